"""The papers' studies: what each runs, and the rows of which its figure is drawn (`jfuse study`, `jfuse.plot`)."""
