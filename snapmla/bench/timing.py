"""The clock of the kernel benchmark.

A window is a captured CUDA graph of several calls, each on pages of its own, so that together they read more than L2
holds; before each window L2 is flushed, outside the timed stretch. The time of a call is the window's divided by its
calls: what a decode step pays that runs one such call after another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]


class Clock(Protocol):
    """What `measure` needs of a device; tests have one without a GPU."""

    def capture(self, calls: Sequence[Call]) -> Call:
        """A function that runs the calls, one after another."""

    def flush(self) -> None:
        """Evict everything from the device's caches."""

    def window_us(self, run: Call) -> float:
        """Microseconds that one run takes on the device, and nothing else."""


class CudaClock:
    """Graph replays between CUDA events, on the current device."""

    def __init__(self) -> None:
        size = 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._unused = torch.zeros(size // 4, dtype=torch.float32, device="cuda")

    def capture(self, calls: Sequence[Call]) -> Call:
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # loads modules and makes metadata, which a capture could not
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def flush(self) -> None:
        self._unused.sum()  # not by writing: what that leaves in L2 is written back inside the window

    def window_us(self, run: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


@dataclass(frozen=True)
class Timing:
    """Of one call, over the windows of a measurement."""

    time_us: float
    """Median."""
    spread: float
    """(90th - 10th percentile) / median."""
    windows: int


def measure(
    clock: Clock, calls: Sequence[Call], *, seconds: float, least: int = 9, rest: float = 0.0
) -> Timing:
    """Time calls that do the same work on inputs of their own; see `measure_together`."""
    return measure_together(clock, {"": calls}, seconds=seconds, least=least, rest=rest)[""]


def measure_together(
    clock: Clock,
    variants: Mapping[str, Sequence[Call]],
    *,
    seconds: float,
    least: int = 9,
    rest: float = 0.0,
) -> dict[str, Timing]:
    """Time several variants in turns, a window each, so that all meet the same clocks and temperature: a GPU at its power
    limit slows down while it is measured.

    Args:
        variants: calls that make one window of each.
        seconds: about how long to measure each variant; at least `least` windows are taken.
        rest: seconds of idleness before each window, in which the GPU cools down.
    """
    runs = {name: clock.capture(calls) for name, calls in variants.items()}
    first = 0.0  # a round warms up, and says how many fit
    for run in runs.values():
        clock.flush()
        first += clock.window_us(run)
    count = max(least, min(200, int(seconds * 1e6 * len(runs) / max(first, 1.0))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            time.sleep(rest)
            clock.flush()
            times[name].append(clock.window_us(run) / len(variants[name]))
    return {name: _timing(values) for name, values in times.items()}


def _timing(times: list[float]) -> Timing:
    deciles, median = statistics.quantiles(times, n=10), statistics.median(times)
    return Timing(median, (deciles[-1] - deciles[0]) / median, len(times))


def calls_in_a_window(bytes_of_a_call: int, cache_bytes: int, most: int = 32) -> int:
    """How many calls read at least four times what the cache holds."""
    return max(1, min(most, -(-4 * cache_bytes // max(bytes_of_a_call, 1))))
