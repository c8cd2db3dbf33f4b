// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a benchmark is timed: the operation and its bound run alternately (A B A B), in one process, over and over. What counts
// is the ratio of a pair that ran at the same moment; its median over all pairs survives a noisy machine, and its quartiles
// show how noisy the machine was. Google Benchmark sees one iteration, whose time is the operation's median.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

namespace kvtrim_bench {

/// Seconds spent on one line of the table; KVTRIM_BENCH_SECONDS overrides it.
inline double seconds_a_line() {
  const char* const given = std::getenv("KVTRIM_BENCH_SECONDS");
  return given != nullptr ? std::atof(given) : 0.5;
}

/// Which clock is read: the thread's CPU time ignores other work on the core, but covers one thread only.
enum class Clock : std::uint8_t { thread, wall };

inline double now(Clock clock) {
  timespec t{};
  clock_gettime(clock == Clock::thread ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

/// Seconds that reading the clock takes; subtracted from each time.
inline double clock_seconds(Clock clock) {
  static const auto measured = [] {
    std::array<double, 2> least{1, 1};
    for (const Clock c : {Clock::thread, Clock::wall}) {
      for (int i = 0; i < 1000; ++i) {
        const double begin = now(c);
        double& known = least[static_cast<std::size_t>(c)];
        known = std::min(known, now(c) - begin);
      }
    }
    return least;
  }();
  return measured[static_cast<std::size_t>(clock)];
}

/// Seconds that `f()` takes.
template <class F>
double seconds_of(F&& f, Clock clock = Clock::thread) {
  const double reading = clock_seconds(clock);
  const double begin = now(clock);
  f();
  benchmark::ClobberMemory();
  return std::max(1e-9, now(clock) - begin - reading);
}

/// Value below which a share `q` of `values` lies.
inline double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

/// What an interleaved run found.
struct Pairs {
  double op = 0;      ///< median seconds of the operation
  double bound = 0;   ///< median seconds of the bound
  double ratio = 0;   ///< median of the pairs' ratios
  double spread = 0;  ///< their interquartile range over the median
  std::int64_t count = 0;
};

/// Calls pair() -> (seconds of the operation, seconds of the bound) until the time is up, at least 5 times.
template <class F>
Pairs collect(F&& pair) {
  pair();  // pages are touched, caches and clocks are warm
  std::vector<double> ops, bounds, ratios;
  const double end = now(Clock::wall) + seconds_a_line();
  while (ops.size() < 5 || (now(Clock::wall) < end && ops.size() < 4000)) {
    const auto [op, bound] = pair();
    ops.push_back(op);
    bounds.push_back(bound);
    ratios.push_back(op / bound);
  }
  Pairs p;
  p.op = quantile(ops, 0.5);
  p.bound = quantile(bounds, 0.5);
  p.ratio = quantile(ratios, 0.5);
  p.spread = (quantile(ratios, 0.75) - quantile(ratios, 0.25)) / p.ratio;
  p.count = static_cast<std::int64_t>(ops.size());
  return p;
}

/// Runs prepare (not timed), op, bound, and again.
template <class Prepare, class Op, class Bound>
Pairs interleave(Prepare&& prepare, Op&& op, Bound&& bound, Clock clock = Clock::thread) {
  return collect([&] {
    prepare();
    const double first = seconds_of(op, clock);
    return std::pair(first, seconds_of(bound, clock));
  });
}
template <class Op, class Bound>
Pairs interleave(Op&& op, Bound&& bound, Clock clock = Clock::thread) {
  return interleave([] {}, std::forward<Op>(op), std::forward<Bound>(bound), clock);
}

/// What one run of the operation works on.
struct Work {
  double items = 0;  ///< rows, scores, pages
  double bytes = 0;  ///< the least that is read and written
  double flops = 0;  ///< of its products
};

/// Hands the result to Google Benchmark. Call it inside the one iteration.
inline void report(benchmark::State& state, const Pairs& p, const Work& work) {
  state.SetIterationTime(p.op);
  state.SetItemsProcessed(static_cast<std::int64_t>(work.items));
  state.SetBytesProcessed(static_cast<std::int64_t>(work.bytes));
  state.counters["ratio"] = p.ratio;
  state.counters["spread"] = p.spread;
  state.counters["bound_ms"] = p.bound * 1e3;
  state.counters["pairs"] = static_cast<double>(p.count);
  if (work.flops > 0) { state.counters["GFLOP/s"] = work.flops / p.op * 1e-9; }
  if (work.bytes > 0) { state.counters["GB/s"] = work.bytes / p.op * 1e-9; }
}

/// Registers a line of the table: `make()` builds the inputs, then runs and reports once.
template <class F>
void line(const std::string& name, F&& f) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [f = std::forward<F>(f)](benchmark::State& state) {
                                 for ([[maybe_unused]] auto _ : state) { f(state); }
                               })
      ->Iterations(1)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

}  // namespace kvtrim_bench
