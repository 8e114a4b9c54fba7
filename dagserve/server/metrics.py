"""Prometheus metrics: HTTP counts kept here; tiers, nodes and catalogs read from the engine at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from dagserve.catalogs import Catalogs

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """All metrics of one service, in a registry of its own."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], catalogs: Catalogs | None = None) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "dagserve_http_requests", "Requests to the endpoint by status.", ["status"], registry=self._registry
        )
        self.latency = Histogram(
            "dagserve_http_request_seconds",
            "Time from a body read to its reply.",
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self.disconnects = Counter(
            "dagserve_http_disconnects", "Clients that left before their reply.", registry=self._registry
        )
        self._registry.register(_EngineCollector(stats))
        if catalogs is not None and catalogs.names:
            self._registry.register(_CatalogCollector(catalogs))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield from _tiers(stats["tiers"])
        for name, value in stats["counters"].items():
            yield CounterMetricFamily(f"dagserve_requests_{name}", f"Requests {name}.", value=value)
        seconds = stats["decode"]["seconds"]
        yield CounterMetricFamily("dagserve_decode_seconds", "Seconds spent decoding bodies.", value=seconds)
        yield from _nodes(stats["nodes"])


class _CatalogCollector(Collector):
    def __init__(self, catalogs: Catalogs) -> None:
        self._catalogs = catalogs

    def collect(self) -> Iterable[Metric]:
        info = InfoMetricFamily("dagserve_catalog", "The version that new requests use.", labels=["catalog"])
        items = GaugeMetricFamily("dagserve_catalog_items", "Items of that version.", labels=["catalog"])
        swaps = CounterMetricFamily(
            "dagserve_catalog_swaps", "Times another version took its place.", labels=["catalog"]
        )
        for name in self._catalogs.names:
            state = self._catalogs.state(name)
            info.add_metric([name], {"version": str(state["version"])})
            items.add_metric([name], state["items"])
            swaps.add_metric([name], self._catalogs.swaps(name))
        yield from (info, items, swaps)


def _tiers(tiers: Mapping[str, Mapping[str, int]]) -> Iterable[Metric]:
    for what, text in (("capacity", "Size of each tier."), ("used", "In use."), ("waiting", "Waiting for the tier.")):
        family = GaugeMetricFamily(f"dagserve_tier_{what}", text, labels=["tier"])
        for tier, values in tiers.items():
            family.add_metric([tier], values[what])
        yield family


def _nodes(nodes: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    runs = CounterMetricFamily("dagserve_node_runs", "Runs of each node.", labels=["node", "engine"])
    seconds = CounterMetricFamily("dagserve_node_seconds", "Seconds spent in each node.", labels=["node", "engine"])
    for name, values in nodes.items():
        runs.add_metric([name, values["engine"]], values["runs"])
        seconds.add_metric([name, values["engine"]], values["seconds"])
    yield runs
    yield seconds
