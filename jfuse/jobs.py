"""What the engine runs: a request by fusion, and the same request by full prefill."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jfuse.config import FusionConfig, Implementation
from jfuse.incoming import Incoming
from jfuse.models.decoder import Model
from jfuse.pipeline import Question, begin, full_prefill, serve
from jfuse.selectors.base import Selector
from jfuse.sources import Source
from jfuse.stitch import Layout
from jfuse.types import ContextCache


def first_token(served: Any) -> int:
    """The id of the first answer token, on the host: where the clock stops."""
    return int(np.argmax(np.asarray(served.first)))


class FusionJob:
    """A request that is served by fusion.

    Args:
        source: makes the request's chunk source when loading may begin.
        params: parameters of a learned selector.
        finish: what to keep of the outcome; the fused context is large.
    """

    def __init__(
        self,
        model: Model,
        source: Callable[[], Source],
        question: Question,
        selector: Selector,
        config: FusionConfig = FusionConfig(),
        *,
        prefix: ContextCache | None = None,
        params: object = None,
        finish: Callable[[Any], Any] = first_token,
    ):
        self._model, self._make_source, self._question = model, source, question
        self._selector, self._config, self._prefix, self._params = selector, config, prefix, params
        self._finish = finish
        self._loading: tuple[Source, Incoming] | None = None
        self._stopped = False

    def begin(self) -> None:
        """Reads the view and the first layers."""
        source = self._make_source()
        incoming = begin(self._model, source, self._selector, self._config, prefix=self._prefix)
        self._loading = source, incoming.start()
        if self._stopped:
            incoming.stop()

    def run(self) -> Any:
        """Serves the request."""
        assert self._loading is not None  # `begin` came first
        source, incoming = self._loading
        served = serve(
            self._model,
            source,
            self._question,
            self._selector,
            self._config,
            prefix=self._prefix,
            params=self._params,
            incoming=incoming,
        )
        return self._finish(served)

    def stop(self) -> None:
        """Ends the request at its next layer."""
        self._stopped = True
        loading = self._loading  # `close` may take it away meanwhile
        if loading is not None:
            loading[1].stop()

    def close(self) -> None:
        """Ends the loading of a request that was never run."""
        if self._loading is not None:
            self._loading[1].__exit__(None, None, None)
            self._loading = None


class PrefillJob:
    """The same request by full prefill, which nothing is loaded for and which cannot be stopped half way."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        question: Question,
        *,
        implementation: Implementation = None,
        finish: Callable[[Any], Any] = first_token,
    ):
        self._run = lambda: finish(full_prefill(model, layout, question, implementation=implementation))

    def begin(self) -> None:
        """Nothing to load."""

    def run(self) -> Any:
        """One causal pass."""
        return self._run()

    def stop(self) -> None:
        """Not possible."""

    def close(self) -> None:
        """Nothing is held."""
