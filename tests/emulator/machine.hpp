// SPDX-License-Identifier: Apache-2.0
#pragma once

// What emulator.cpp and racecheck.cpp share. Neither is compiled with a sanitizer.

#include "emulator.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvtrim::emulator {

struct Warp {
  Lane* lanes = nullptr;
  std::uint32_t present = 0;     // lanes of the block's threads
  std::uint32_t ready = 0;       // can run
  std::uint32_t waiting = 0;     // in a collective
  const Lane* last = nullptr;    // that came to a collective
  std::uint32_t with_last = 0;   // lanes that it met in the same one, itself included
  std::uint32_t at_barrier = 0;  // in a block barrier
  std::uint32_t exited = 0;
  std::uint32_t epoch = 0;  // memory-ordering collectives of the whole warp so far
};

struct SharedArray {
  const void* key;
  void* memory;
};

struct Block {
  unsigned linear = 0;  // in the grid
  unsigned threads = 0;
  unsigned warp_count = 0;
  unsigned live = 0;
  unsigned arrived = 0;     // at the barrier
  std::uint32_t epoch = 0;  // block barriers so far
  const char* barrier = "";
  Site barrier_site{};
  unsigned barrier_value = 0;
  unsigned barrier_result = 0;
  Warp warps[32];
  Lane host;  // the launching thread's own context
  std::vector<SharedArray> arrays;
  std::size_t static_bytes = 0;
  std::size_t dynamic_bytes = 0;
  int shared_limit = -1;  // of the kernel, as the launch found it
  void* dynamic = nullptr;
  void (*entry)(void*) = nullptr;
  void* arguments = nullptr;
  std::uint64_t random = 1;
  bool failed = false;
};

/// Ends the kernel with a message; never comes back to the calling fiber.
[[noreturn]] void fail(std::string text);

/// What the race checker wants to know; null without it.
struct Hooks {
  void (*atomic)(const void*, unsigned bytes, void* caller) = nullptr;
  void (*copied)(const void* from, void* to, unsigned bytes, void* caller) = nullptr;
  void (*add)(const void*, std::size_t bytes, const char* name, bool shared) = nullptr;
  void (*remove)(const void*) = nullptr;
  void (*written)(const void*, std::size_t bytes) = nullptr;
  void (*launched)() = nullptr;
  void (*fenced)() = nullptr;
};
extern Hooks hooks;
/// Set while an instruction of a whole warp runs: it may touch the stacks of all lanes.
extern bool inside_instruction;

}  // namespace kvtrim::emulator
