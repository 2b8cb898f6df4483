"""Prometheus metrics, named as vLLM names them, with the prefix `finback:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from finback.engine.stats import Stats

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)


class Metrics:
    """One server's metrics. stats: gives the engine's counters at the time of asking."""

    def __init__(self, model: str, stats: Callable[[], Stats]):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model, stats))

        def histogram(name: str, text: str) -> Histogram:
            found = Histogram(f"finback:{name}", text, ["model_name"], buckets=_SECONDS, registry=self._registry)
            return found.labels(model)

        self.first_token = histogram("time_to_first_token_seconds", "From a request to its first token.")
        self.whole = histogram("e2e_request_latency_seconds", "From a request to the end of its answer.")
        self.per_token = histogram("time_per_output_token_seconds", "Time of an answer after its first token, a token.")

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, model: str, stats: Callable[[], Stats]):
        self._model, self._stats = model, stats

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        stats = self._stats()
        yield self._gauge("num_requests_running", "Requests in the batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        used = [stats.pages_used.get(c, 0) / n for c, n in stats.pages_total.items() if n]
        yield self._gauge("kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", max(used, default=0.0))
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.generated_tokens),
            ("num_preemptions", "Requests that had to start over.", stats.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_tokens_asked),
            ("prefix_cache_hits", "Tokens found there.", stats.prefix_tokens_hit),
            ("spec_decode_num_draft_tokens", "Drafted tokens.", sum(stats.drafted)),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", sum(stats.accepted)),
            ("engine_steps", "Forward passes.", stats.steps),
        ):
            yield self._counter(name, text, [("", value)])
        finished = list(stats.finished.copy().items())
        yield self._counter("request_success", "Finished requests.", finished, "finished_reason")

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"finback:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(
        self, name: str, text: str, values: Sequence[tuple[str, float]], label: str | None = None
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"finback:{name}", text, labels=["model_name", *([label] if label else [])])
        for kind, value in values:
            family.add_metric([self._model, *([kind] if label else [])], value)
        return family
