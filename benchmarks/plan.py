"""The break-even estimate against QCFuse's published times, as in docs/plan.md. Usage: python benchmarks/plan.py."""

from jfuse.evals.published import compare, table

if __name__ == "__main__":
    print(table(compare()), end="")
