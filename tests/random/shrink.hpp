// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs of a world, and the shortest list of its operations that still fails. An operation is a number: what it does depends
// on the world's seed, on this number and on what the cache is like when it is its turn, so that any of them can be left out.

#include "random/evictions.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvtrim::random_test {

/// Which of a world's operations are done, ascending.
using Steps = std::vector<std::int32_t>;

inline Steps all_steps(std::int32_t n) {
  Steps steps(at(n));
  std::iota(steps.begin(), steps.end(), 0);
  return steps;
}

struct Outcome {
  std::optional<std::string> failure;
  std::size_t done = 0;  // operations, the one that failed included
  std::string history;
  std::set<EvictingWorld::Eviction> evictions;
};

/// Does the operations `steps` of world `seed`: where its cache is a PagedCache, in lock step with the same in foreign memory,
/// and both are the same after each.
inline Outcome run(std::uint64_t seed,
                   const Steps& steps,
                   bool talks = false,
                   const Parts& parts = {}) {
  Outcome out;
  EvictingWorld world(seed, talks, parts);
  std::optional<EvictingWorld> twin;
  if (!world.setup().foreign) { twin.emplace(seed, false, parts, true); }
  try {
    for (const std::int32_t step : steps) {
      ++out.done;
      const std::uint64_t operation = seed * 0x1'0000'0000U + static_cast<std::uint64_t>(step);
      world.operate(operation);
      if (!twin) { continue; }
      twin->operate(operation);
      const auto &own = world.seen(), &other = twin->seen();
      const auto [a, b] = std::mismatch(own.begin(), own.end(), other.begin(), other.end());
      if (a == own.end() && b == other.end()) { continue; }
      throw std::runtime_error(std::string("another ") + (a == own.end() ? b->what : a->what) +
                               " in foreign memory");
    }
  } catch (const std::runtime_error& error) { out.failure = error.what(); }
  out.history = world.history(), out.evictions = world.evictions();
  if (twin) { out.evictions.insert(twin->evictions().begin(), twin->evictions().end()); }
  return out;
}

/// Whether they fail, in a process of its own: then an assertion, or a sanitizer, may end it.
///
/// \param talks  it says what it does, on stderr
inline bool fails(std::uint64_t seed,
                  const Steps& steps,
                  bool talks = false,
                  const Parts& parts = {}) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) { throw std::runtime_error("no process"); }
  if (child == 0) {
    for (const int s : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) { std::signal(s, SIG_DFL); }
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    if (!talks && std::freopen("/dev/null", "w", stderr) == nullptr) { _exit(2); }
    const Outcome out = run(seed, steps, talks, parts);
    if (talks && out.failure) { std::fprintf(stderr, "%s\n", out.failure->c_str()); }
    std::fflush(nullptr);
    _exit(out.failure ? 1 : 0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) != child) {}
  return status != 0;
}

/// Steps of which none can be left out: those that remain when parts, of half of them down to a single one, are.
///
/// \param fails  whether steps do; `steps` themselves do
template <class Fails>
Steps shrunk(Steps steps, Fails&& fails) {
  for (std::size_t part = (steps.size() + 1) / 2;;) {
    bool fewer = false;
    for (std::size_t i = 0; i < steps.size();) {
      Steps rest(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(i));
      if (i + part < steps.size()) {
        rest.insert(rest.end(), steps.begin() + static_cast<std::ptrdiff_t>(i + part), steps.end());
      }
      if (fails(rest)) {
        steps = rest, fewer = true;
      } else {
        i += part;
      }
    }
    if (part == 1 && !fewer) { return steps; }
    part = part == 1 ? 1 : part / 2;
  }
}

}  // namespace kvtrim::random_test
