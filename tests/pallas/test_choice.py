"""K-07: which implementation runs. The GPU is pretended, the kernels are plain functions that fail in every way."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.pallas import choice
from jfuse.pallas.choice import Device, Kernel, choose, fallbacks, pretended

HOPPER = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


def double(x):
    return 2 * x


def kernel(name, run, supports=lambda device, dtype, size: True):
    def counted(x, *, interpret):
        calls.append((name, interpret))
        return run(x)

    calls = []
    trial = lambda dtype, size: (np.arange(1, 1 + size).astype(dtype),)  # noqa: E731
    return Kernel(name, counted, supports, trial), calls


def broken(x):
    raise RuntimeError("Shared memory size limit exceeded:\nrequested 280320")


@pytest.fixture
def gpu(monkeypatch):
    """A process whose default device says that it is a Hopper card, and remembers nothing yet."""
    monkeypatch.setattr(jax, "devices", lambda *_: [HOPPER])
    choice.forget()
    yield
    choice.forget()


def decide(kernels, implementation=None, dtype=jnp.float32, size=4):
    return choose("doubling", implementation, kernels, double, dtype, size)


def test_a_kernel_that_holds_is_chosen_after_one_trial(gpu):
    """It is compiled once per device, op, dtype and head size; nothing is warned of."""
    good, calls = kernel("good", double)
    for _ in range(3):
        np.testing.assert_array_equal(
            decide((good,))(
                np.ones(3),
            ),
            2 * np.ones(3),
        )
    assert calls.count(("good", False)) == 1 + 3
    decide((good,), size=8)
    decide((good,), dtype=jnp.bfloat16)
    assert len(calls) == 6 and fallbacks() == ()


@pytest.mark.parametrize(
    ("run", "reason"),
    [(broken, "Shared memory"), (lambda x: 2 * x + 1, "off by"), (lambda x: x * jnp.nan, "off by")],
    ids=["does not compile", "is wrong", "gives NaN"],
)
def test_one_that_does_not_is_replaced_with_one_warning(gpu, run, reason):
    """The next kernel runs, or the definition; the reason stays for the reports; later calls neither try nor warn."""
    (bad, tried), (good, _) = kernel("bad", run), kernel("good", double)
    with pytest.warns(RuntimeWarning, match=f"good instead of bad; .*{reason}"):
        assert decide((bad, good))(np.ones(1)) == 2
    with pytest.warns(RuntimeWarning, match=f"XLA instead of bad; .*{reason}"):
        assert decide((bad,)) is double
    assert len(tried) == 2 and [line.split("; ")[0].split(": ")[1] for line in fallbacks()] == [
        "good instead of bad",
        "XLA instead of bad",
    ]
    assert decide((bad,)) is double and len(tried) == 2


def test_it_may_be_decided_inside_a_trace(gpu):
    """The trial of an op runs while the step around it is being traced, and leaves nothing behind in it."""
    (bad, _), (good, calls) = kernel("bad", lambda x: x), kernel("good", double)
    with pytest.warns(RuntimeWarning, match="good instead of bad"):
        step = jax.jit(lambda x: decide((bad, good))(x) + 1)
        np.testing.assert_array_equal(step(np.ones(2, np.float32)), [3, 3])
    assert len(calls) == 2
    assert len(jax.make_jaxpr(lambda x: decide((bad, good))(x) + 1)(1.0).eqns) == 2


def test_pallas_never_falls_back(gpu):
    """It runs a kernel or says why it cannot."""
    (bad, _), (picky, _) = kernel("bad", broken), kernel("picky", double, lambda device, dtype, size: size == 64)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="doubling in float32 .* NVIDIA H200"):
        decide((bad,), "pallas")
    with pytest.warns(RuntimeWarning, match="none supports"), pytest.raises(ValueError, match="head size 4"):
        decide((picky,), "pallas")
    assert decide((picky,)) is double
    assert decide((picky,), "xla", size=64) is double


def test_without_a_gpu_nothing_is_tried_and_pallas_is_refused():
    good, calls = kernel("good", double)
    assert decide((good,)) is double and decide((good,), "xla") is double and not calls
    with pytest.raises(ValueError, match='doubling needs a CUDA GPU, but the default device is a cpu; use "xla"'):
        decide((good,), "pallas")


def test_a_pretended_device_is_part_of_what_jit_remembers():
    """One jitted function inside and outside the context: the CPU runs the definition, as before and after."""
    good, calls = kernel("good", double)
    step = jax.jit(lambda x: decide((good,))(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(1.0)
        with pretended(Device("NVIDIA A100", (8, 0))):
            step(1.0)
        assert calls == [("good", False)]
        with pretended(choice.INTERPRETED):
            step(1.0)
        step(1.0)
    assert calls == [("good", False), ("good", True)]
