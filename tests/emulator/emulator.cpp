// SPDX-License-Identifier: Apache-2.0

// The machine: fibers, scheduling, collectives, shared memory. Compiled without sanitizers in every build; with
// KVTRIM_EMULATOR_ASAN it tells AddressSanitizer about its stacks.

#include "machine.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>

#if !defined(__x86_64__)
#  include <ucontext.h>
#endif

#if defined(KVTRIM_EMULATOR_ASAN)
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, std::size_t);
void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*);
void __asan_unpoison_memory_region(const volatile void*, std::size_t);
}
#endif

namespace kvtrim::emulator {

Lane* current = nullptr;
Geometry geometry;
Hooks hooks;
bool inside_instruction = false;

namespace {

// A frame of the sanitizers is several times as large as that of the plain build.
#if defined(KVTRIM_EMULATOR_ASAN)
constexpr std::size_t stack_bytes = 256U * 1024U;
#else
constexpr std::size_t stack_bytes = 96U * 1024U;
#endif
constexpr std::size_t guard_bytes = 4096;
constexpr unsigned most_threads = 1024;

std::string last_message;
bool last_failed = false;

[[noreturn]] void broken(const char* what) {
  std::fprintf(stderr, "kvtrim emulator: %s\n", what);
  std::abort();
}

// --- context switch ----------------------------------------------------------------------------
#if defined(__x86_64__)
// Saves the registers that a function must keep, swaps the stack, restores the other side's.
extern "C" void kvtrim_emulator_switch(void** save, void* load);
__asm__(
    ".text\n.globl kvtrim_emulator_switch\n.type kvtrim_emulator_switch,@function\n"
    "kvtrim_emulator_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
    ".size kvtrim_emulator_switch,.-kvtrim_emulator_switch\n");
void swap_stacks(Lane& from, Lane& to) {
  kvtrim_emulator_switch(&from.stack_pointer, to.stack_pointer);
}
void prepare_stack(Lane& lane, void (*entry)()) {
  // Where `ret` of the switch finds the entry: six registers below it, and the stack as a call would leave it.
  auto** top = reinterpret_cast<void**>(lane.stack + lane.stack_bytes - 16);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) { *--top = nullptr; }
  lane.stack_pointer = top;
}
#else
ucontext_t& context_of(Lane& lane) {
  if (lane.stack_pointer == nullptr) { lane.stack_pointer = new ucontext_t; }
  return *static_cast<ucontext_t*>(lane.stack_pointer);
}
void swap_stacks(Lane& from, Lane& to) {
  swapcontext(&context_of(from), &context_of(to));
}
void prepare_stack(Lane& lane, void (*entry)()) {
  ucontext_t& context = context_of(lane);
  getcontext(&context);
  context.uc_stack.ss_sp = lane.stack;
  context.uc_stack.ss_size = lane.stack_bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

void switch_to(Lane& to, [[maybe_unused]] bool ends = false) {
  Lane& from = *current;
  if (&from == &to) { return; }
  current = &to;
#if defined(KVTRIM_EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.sanitizer_stack, to.stack, to.stack_bytes);
#endif
  swap_stacks(from, to);
#if defined(KVTRIM_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(from.sanitizer_stack, nullptr, nullptr);
#endif
}

// Stacks for the threads of a block, each with a guard page below it; kept for the process.
std::byte* stack_of(unsigned thread) {
  static std::byte* const base = [] {
    const std::size_t stride = stack_bytes + guard_bytes;
    void* const p = mmap(nullptr,
                         stride * most_threads,
                         PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                         -1,
                         0);
    if (p == MAP_FAILED) { broken("no memory for stacks"); }
    for (unsigned i = 0; i < most_threads; ++i) {
      mprotect(static_cast<std::byte*>(p) + i * stride, guard_bytes, PROT_NONE);
    }
    return static_cast<std::byte*>(p);
  }();
  return base + thread * (stack_bytes + guard_bytes) + guard_bytes;
}

// --- words ---------------------------------------------------------------------------------------
std::string text_of(Site s) {
  std::string file = s.file;
  if (const auto slash = file.rfind('/'); slash != std::string::npos) { file.erase(0, slash + 1); }
  return file + ":" + std::to_string(s.line);
}
std::string text_of(std::uint32_t mask) {
  char hex[16];
  std::snprintf(hex, sizeof hex, "%08x", mask);
  return hex;
}
std::string where(const Lane& l) {
  const auto triple = [](unsigned x, unsigned y, unsigned z) {
    return "(" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
  };
  return "block " + triple(geometry.block.x, geometry.block.y, geometry.block.z) + " thread " +
         triple(l.thread.x, l.thread.y, l.thread.z) + ", warp " + std::to_string(l.linear / 32) +
         " lane " + std::to_string(l.id);
}

template <class F>
void for_each_lane(std::uint32_t mask, F&& f) {
  for (; mask != 0; mask &= mask - 1) { f(static_cast<unsigned>(std::countr_zero(mask))); }
}

// --- scheduling ------------------------------------------------------------------------------------
std::uint64_t next_random(Block& b) {
  b.random ^= b.random << 13U;
  b.random ^= b.random >> 7U;
  b.random ^= b.random << 17U;
  return b.random;
}

// A set bit of `bits`, from a random place on.
unsigned random_bit(std::uint32_t bits, std::uint64_t random) {
  const auto turn = static_cast<int>(random & 31U);
  return static_cast<unsigned>(std::countr_zero(std::rotr(bits, turn)) + turn) & 31U;
}

// Takes the next lane off the ready ones; null where none is.
Lane* take_ready(Block& b, Warp* here) {
  const bool stay = here != nullptr && here->ready != 0;
  const auto ready_warps = [&] {
    std::uint32_t warps = 0;
    for (unsigned w = 0; w < b.warp_count; ++w) { warps |= b.warps[w].ready != 0 ? 1U << w : 0U; }
    return warps;
  };
  std::uint32_t warps = 0;
  if (!stay && (warps = ready_warps()) == 0) { return nullptr; }
  Warp* warp = here;
  unsigned lane = 0;
  switch (options().schedule) {
    case Schedule::in_order:
      if (!stay) { warp = &b.warps[std::countr_zero(warps)]; }
      lane = static_cast<unsigned>(std::countr_zero(warp->ready));
      break;
    case Schedule::reverse:
      if (!stay) { warp = &b.warps[31 - std::countl_zero(warps)]; }
      lane = 31U - static_cast<unsigned>(std::countl_zero(warp->ready));
      break;
    case Schedule::random: {
      const std::uint64_t r = next_random(b);
      if (!stay || (r & 7U) == 0) { warp = &b.warps[random_bit(ready_warps(), r >> 8U)]; }
      lane = random_bit(warp->ready, r >> 16U);
      break;
    }
  }
  warp->ready &= ~(1U << lane);
  return &warp->lanes[lane];
}

std::string deadlock(const Block& b) {
  std::string text = "deadlock: no thread can go on";
  for (unsigned w = 0; w < b.warp_count; ++w) {
    const Warp& warp = b.warps[w];
    std::uint32_t rest = warp.waiting | warp.at_barrier;
    while (rest != 0) {
      const Lane& first = warp.lanes[std::countr_zero(rest)];
      std::uint32_t same = 0;
      for_each_lane(rest, [&](unsigned i) {
        const Lane& l = warp.lanes[i];
        if (l.collective == first.collective && l.site == first.site && l.mask == first.mask) {
          same |= 1U << i;
        }
      });
      rest &= ~same;
      text += "\n  warp " + std::to_string(w) + " lanes " + text_of(same) + " wait in " +
              (first.collective != nullptr ? first.collective->name : b.barrier) + " at " +
              text_of(first.site);
    }
  }
  return text;
}

void run_another() {
  Lane* const next = take_ready(*current->block, current->warp);
  if (next == nullptr) { fail(deadlock(*current->block)); }
  switch_to(*next);
}

// Where a random schedule may change over although nothing has to wait.
void maybe_change_over() {
  if (options().schedule != Schedule::random) { return; }
  Block& b = *current->block;
  if ((next_random(b) & 3U) != 0) { return; }
  current->warp->ready |= 1U << current->id;
  switch_to(*take_ready(b, current->warp));
}

// --- collectives of a warp ---------------------------------------------------------------------------
bool together(const Lane& a, const Lane& b) {
  return a.collective == b.collective && a.mask == b.mask && a.site == b.site;
}

template <class Source>
void shuffle(Lane* lanes, std::uint32_t mask, Source source) {
  for_each_lane(mask, [&](unsigned i) {
    Lane& l = lanes[i];
    const auto from = static_cast<unsigned>(
        source(static_cast<int>(i), static_cast<int>(l.argument), static_cast<int>(l.width)));
    if ((mask >> from & 1U) == 0) {
      fail(std::string(l.collective->name) + " at " + text_of(l.site) + ": lane " +
           std::to_string(i) + " reads lane " + std::to_string(from) +
           ", which is not in the mask");
    }
    l.out = lanes[from].in;
  });
}
void shuffle_index_of(Lane* lanes, std::uint32_t mask) {
  shuffle(lanes, mask, [](int i, int a, int w) { return (i & ~(w - 1)) + (a & (w - 1)); });
}
void shuffle_up_of(Lane* lanes, std::uint32_t mask) {
  shuffle(lanes, mask, [](int i, int a, int w) { return (i & (w - 1)) >= a ? i - a : i; });
}
void shuffle_down_of(Lane* lanes, std::uint32_t mask) {
  shuffle(lanes, mask, [](int i, int a, int w) { return (i & (w - 1)) + a < w ? i + a : i; });
}
void shuffle_xor_of(Lane* lanes, std::uint32_t mask) {
  shuffle(lanes, mask, [](int i, int a, int w) {
    const int from = i ^ a;
    return from < (i & ~(w - 1)) + w ? from : i;
  });
}

std::uint32_t votes(const Lane* lanes, std::uint32_t mask) {
  std::uint32_t bits = 0;
  for_each_lane(mask, [&](unsigned i) { bits |= lanes[i].in != 0 ? 1U << i : 0U; });
  return bits;
}
void set_all(Lane* lanes, std::uint32_t mask, std::uint64_t value) {
  for_each_lane(mask, [&](unsigned i) { lanes[i].out = value; });
}
void ballot_of(Lane* lanes, std::uint32_t mask) {
  set_all(lanes, mask, votes(lanes, mask));
}
void any_of(Lane* lanes, std::uint32_t mask) {
  set_all(lanes, mask, votes(lanes, mask) != 0 ? 1 : 0);
}
void all_of(Lane* lanes, std::uint32_t mask) {
  set_all(lanes, mask, votes(lanes, mask) == mask ? 1 : 0);
}
void nothing(Lane* lanes, std::uint32_t mask) {
  set_all(lanes, mask, 0);
}
void match_of(Lane* lanes, std::uint32_t mask) {
  for_each_lane(mask, [&](unsigned i) {
    std::uint32_t same = 0;
    for_each_lane(mask, [&](unsigned k) { same |= lanes[k].in == lanes[i].in ? 1U << k : 0U; });
    lanes[i].out = same;
  });
}
template <class T, class F>
void reduce(Lane* lanes, std::uint32_t mask, F combine) {
  bool first = true;
  T value{};
  for_each_lane(mask, [&](unsigned i) {
    const T x = static_cast<T>(static_cast<std::uint32_t>(lanes[i].in));
    value = first ? x : combine(value, x);
    first = false;
  });
  set_all(lanes, mask, static_cast<std::uint32_t>(value));
}
using U = std::uint32_t;
using I = std::int32_t;
void add_of(Lane* lanes, std::uint32_t mask) {
  reduce<U>(lanes, mask, [](U a, U b) { return a + b; });
}
void min_u_of(Lane* lanes, std::uint32_t mask) {
  reduce<U>(lanes, mask, [](U a, U b) { return std::min(a, b); });
}
void max_u_of(Lane* lanes, std::uint32_t mask) {
  reduce<U>(lanes, mask, [](U a, U b) { return std::max(a, b); });
}
void min_i_of(Lane* lanes, std::uint32_t mask) {
  reduce<I>(lanes, mask, [](I a, I b) { return std::min(a, b); });
}
void max_i_of(Lane* lanes, std::uint32_t mask) {
  reduce<I>(lanes, mask, [](I a, I b) { return std::max(a, b); });
}
void and_of(Lane* lanes, std::uint32_t mask) {
  reduce<U>(lanes, mask, [](U a, U b) { return a & b; });
}
void or_of(Lane* lanes, std::uint32_t mask) {
  reduce<U>(lanes, mask, [](U a, U b) { return a | b; });
}
void xor_of(Lane* lanes, std::uint32_t mask) {
  reduce<U>(lanes, mask, [](U a, U b) { return a ^ b; });
}

void (*whole_warp_work)(void* const operands[32]) = nullptr;
void whole_warp_of(Lane* lanes, std::uint32_t mask) {
  void* operands[32];
  for (unsigned i = 0; i < 32; ++i) { operands[i] = reinterpret_cast<void*>(lanes[i].in); }
  inside_instruction = true;
  whole_warp_work(operands);
  inside_instruction = false;
  set_all(lanes, mask, 0);
}
const Collective whole_warp_collective{"a whole warp's instruction", whole_warp_of};

// --- the block's barrier -------------------------------------------------------------------------------
void open_barrier(Block& b) {
  b.barrier_result = b.barrier_value;
  b.arrived = 0;
  ++b.epoch;
  for (unsigned w = 0; w < b.warp_count; ++w) {
    b.warps[w].ready |= b.warps[w].at_barrier;
    b.warps[w].at_barrier = 0;
  }
}

// --- a thread's life --------------------------------------------------------------------------------------
[[noreturn]] void leave() {
  Lane& me = *current;
  Block& b = *me.block;
  Warp& warp = *me.warp;
  if (me.copy_count != 0) {
    fail("a thread exits with asynchronous copies that it never waited for");
  }
  if (b.arrived != 0) {
    fail("a thread exits while others wait in " + std::string(b.barrier) + " at " +
         text_of(b.barrier_site));
  }
  for_each_lane(warp.waiting, [&](unsigned i) {
    const Lane& l = warp.lanes[i];
    if ((l.mask >> me.id & 1U) != 0) {
      fail("a thread exits although the mask of " + std::string(l.collective->name) + " at " +
           text_of(l.site) + " names it");
    }
  });
  warp.exited |= 1U << me.id;
  --b.live;
  Lane* const next = b.live == 0 ? &b.host : take_ready(b, &warp);
  if (next == nullptr) { fail(deadlock(b)); }
  switch_to(*next, true);
  broken("a thread came back after its end");
}

void begin() {
#if defined(KVTRIM_EMULATOR_ASAN)
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  Lane& host = current->block->host;
  if (host.stack == nullptr) {
    host.stack = static_cast<std::byte*>(const_cast<void*>(bottom));
    host.stack_bytes = size;
  }
#endif
  current->block->entry(current->block->arguments);
  leave();
}

void run_block(Block& b, std::vector<Lane>& lanes, dim3 dim, std::size_t shared_bytes) {
  b.threads = b.live = dim.x * dim.y * dim.z;
  b.warp_count = (b.threads + 31) / 32;
  b.arrived = 0;
  b.epoch = 0;
  b.static_bytes = 0;
  b.failed = false;
  b.host = Lane{};
  b.host.block = &b;
  b.dynamic = nullptr;
  if (shared_bytes != 0) {
    b.dynamic = device_allocate(shared_bytes, "dynamic shared memory");
    if (hooks.remove != nullptr) {
      hooks.remove(b.dynamic);
      hooks.add(b.dynamic, shared_bytes, "dynamic shared memory", true);
    }
  }
  if (lanes.size() < b.threads) { lanes.resize(b.threads); }
  for (unsigned i = 0; i < b.threads; ++i) {
    Lane& l = lanes[i];
    l.sanitizer_stack = nullptr;
    l.collective = nullptr;
    l.mask = 0;
    l.copy_count = 0;
    l.copy_group = 0;
    l.block = &b;
    l.warp = &b.warps[i / 32];
    l.linear = i;
    l.id = i % 32;
    l.thread = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
    l.stack = stack_of(i);
    l.stack_bytes = stack_bytes;
    prepare_stack(l, begin);
  }
  for (unsigned w = 0; w < b.warp_count; ++w) {
    const unsigned count = std::min(32U, b.threads - w * 32);
    b.warps[w] = Warp{};
    b.warps[w].lanes = lanes.data() + w * 32;
    b.warps[w].present = b.warps[w].ready = count == 32 ? ~0U : (1U << count) - 1U;
  }
  Lane* const outside = current;
  current = &b.host;
  switch_to(*take_ready(b, nullptr));
  current = outside;
#if defined(KVTRIM_EMULATOR_ASAN)
  for (unsigned i = 0; b.failed && i < b.threads; ++i) {  // frames that nobody returned from
    __asan_unpoison_memory_region(lanes[i].stack, lanes[i].stack_bytes);
  }
#endif
  for (const SharedArray& a : b.arrays) { device_free(a.memory); }
  b.arrays.clear();
  if (b.dynamic != nullptr) { device_free(b.dynamic); }
}

cudaError_t refuse(std::string text, cudaError_t status = cudaErrorInvalidConfiguration) {
  last_message = std::move(text);
  return status;
}

// --- what the runtime knows of kernels: host threads share it ------------------------------------------------
std::mutex kernels_mutex;
std::map<std::pair<int, const void*>, Kernel>& kernels() {
  static std::map<std::pair<int, const void*>, Kernel> known;
  return known;
}

// Whether a block may have so much shared memory: the launch's limit is 48 KiB for static and dynamic arrays together, or what
// the attribute says for the dynamic one, and the attribute can only be set to what static arrays leave.
void check_shared(const Block& b) {
  const std::size_t all = b.static_bytes + b.dynamic_bytes;
  const auto words = [&] {
    return std::to_string(b.static_bytes) + " static + " + std::to_string(b.dynamic_bytes) +
           " dynamic bytes of shared memory, limit " + std::to_string(b.shared_limit);
  };
  if (b.static_bytes > static_shared_bytes) { fail("more than 48 KiB of static shared memory"); }
  if (b.shared_limit < 0 ? all > static_shared_bytes
                         : b.dynamic_bytes > static_cast<std::size_t>(b.shared_limit) &&
                               all > static_shared_bytes) {
    fail("the launch would fail: " + words());
  }
  if (b.shared_limit >= 0 &&
      b.static_bytes + static_cast<std::size_t>(b.shared_limit) > block_shared_bytes) {
    fail("the limit could not have been set: " + words());
  }
}

}  // namespace

const Collective shuffle_index{"__shfl_sync", shuffle_index_of};
const Collective shuffle_up{"__shfl_up_sync", shuffle_up_of};
const Collective shuffle_down{"__shfl_down_sync", shuffle_down_of};
const Collective shuffle_xor{"__shfl_xor_sync", shuffle_xor_of};
const Collective ballot{"__ballot_sync", ballot_of};
const Collective any{"__any_sync", any_of};
const Collective all{"__all_sync", all_of};
const Collective sync_warp{"__syncwarp", nothing, true};
const Collective match_any{"__match_any_sync", match_of};
const Collective reduce_add{"__reduce_add_sync", add_of};
const Collective reduce_min_unsigned{"__reduce_min_sync", min_u_of};
const Collective reduce_max_unsigned{"__reduce_max_sync", max_u_of};
const Collective reduce_min_signed{"__reduce_min_sync", min_i_of};
const Collective reduce_max_signed{"__reduce_max_sync", max_i_of};
const Collective reduce_and{"__reduce_and_sync", and_of};
const Collective reduce_or{"__reduce_or_sync", or_of};
const Collective reduce_xor{"__reduce_xor_sync", xor_of};

Options& options() {
  static Options start = [] {
    Options o;
    if (const char* schedule = std::getenv("KVTRIM_EMU_SCHEDULE"); schedule != nullptr) {
      const std::string name = schedule;
      if (name == "reverse") {
        o.schedule = Schedule::reverse;
      } else if (name == "random") {
        o.schedule = Schedule::random;
      } else if (name != "in_order") {
        broken("KVTRIM_EMU_SCHEDULE is in_order, reverse or random");
      }
    }
    if (const char* seed = std::getenv("KVTRIM_EMU_SEED"); seed != nullptr) {
      o.seed = std::strtoull(seed, nullptr, 10);
    }
    return o;
  }();
  return start;
}

const std::string& message() {
  return last_message;
}
bool checks_races() {
  return hooks.atomic != nullptr;
}

void fail(std::string text) {
  Block& b = *current->block;
  b.failed = true;
  last_failed = true;
  last_message = text + "\n  in " + where(*current);
  // The fiber's stack is given up as it is: free what this frame owns first.
  std::string().swap(text);
  switch_to(b.host);
  broken("a failed kernel went on");
}

std::uint64_t meet(const Collective& what,
                   std::uint32_t mask,
                   std::uint64_t value,
                   std::uint32_t argument,
                   std::uint32_t width,
                   Site site) {
  Lane& me = *current;
  Warp& warp = *me.warp;
  const std::uint32_t bit = 1U << me.id;
  const auto refuse_call = [&](const std::string& text) {
    fail(std::string(what.name) + " at " + text_of(site) + ": " + text);
  };
  if ((mask & bit) == 0) { refuse_call("the calling lane is not in its own mask"); }
  if ((mask & ~warp.present) != 0) {
    refuse_call("the mask names lanes beyond the end of the block");
  }
  if ((mask & warp.exited) != 0) { refuse_call("the mask names lanes that have exited"); }
  if (!std::has_single_bit(width) || width > 32) {
    refuse_call("the width must be a power of two up to 32");
  }
  me.collective = &what;
  me.mask = mask;
  me.in = value;
  me.argument = argument;
  me.width = width;
  me.site = site;
  std::uint32_t here = bit;
  const std::uint32_t others = warp.waiting & mask;
  if (others != 0 && others == warp.with_last && together(*warp.last, me)) {
    here |= others;
  } else {
    for_each_lane(others, [&](unsigned i) {
      const Lane& other = warp.lanes[i];
      if (together(other, me)) {
        here |= 1U << i;
      } else if ((other.mask & bit) != 0) {
        refuse_call((other.mask != mask
                         ? "lanes of one mask disagree about it; another lane is in "
                         : "the warp has diverged: another lane of the mask is in ") +
                    std::string(other.collective->name) + " at " + text_of(other.site));
      }
    });
  }
  warp.waiting |= bit;
  warp.last = &me;
  warp.with_last = here;
  if (here != mask) {
    run_another();
    return me.out;
  }
  what.resolve(warp.lanes, mask);
  warp.waiting &= ~mask;
  if (what.orders_memory && mask == (warp.present & ~warp.exited)) { ++warp.epoch; }
  warp.ready |= mask & ~bit;
  if (options().schedule == Schedule::random) {
    warp.ready |= bit;
    switch_to(*take_ready(*me.block, &warp));
  }
  return me.out;
}

unsigned meet_block(const char* name, char combine, unsigned value, Site site) {
  Lane& me = *current;
  Block& b = *me.block;
  me.collective = nullptr;
  me.site = site;
  me.mask = 0;
  if (b.live != b.threads) {
    fail(std::string(name) + " at " + text_of(site) + ": " + std::to_string(b.threads - b.live) +
         " threads of the block have exited before");
  }
  if (b.arrived == 0) {
    b.barrier = name;
    b.barrier_site = site;
    b.barrier_value = combine == '&' ? 1U : 0U;
  } else if (!(b.barrier_site == site)) {
    fail("barrier divergence: " + std::string(name) + " at " + text_of(site) +
         ", while others wait in " + b.barrier + " at " + text_of(b.barrier_site));
  }
  switch (combine) {
    case '+':
      b.barrier_value += value;
      break;
    case '&':
      b.barrier_value &= value;
      break;
    case '|':
      b.barrier_value |= value;
      break;
    default:
      break;
  }
  me.warp->at_barrier |= 1U << me.id;
  if (++b.arrived == b.threads) {
    open_barrier(b);
    if (options().schedule == Schedule::random) {
      switch_to(*take_ready(b, nullptr));
    } else {  // goes on itself
      me.warp->ready &= ~(1U << me.id);
    }
  } else {
    run_another();
  }
  return b.barrier_result;
}

void whole_warp(const char* /*name*/,
                void* operands,
                void (*work)(void* const operands[32]),
                Site site) {
  whole_warp_work = work;
  meet(whole_warp_collective, ~0U, reinterpret_cast<std::uintptr_t>(operands), 0, 32, site);
}

void check_aligned(const void* p, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(p) % bytes != 0) {
    fail("a vector of " + std::to_string(bytes) + " bytes is not aligned");
  }
}

void async_copy_16(void* to, const void* from) {
  Lane& me = *current;
  if (((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) & 15U) !=
      0) {
    fail("an asynchronous copy of 16 bytes is not aligned to 16");
  }
  if (me.copy_count == Lane::most_copies) { fail("more than 64 asynchronous copies in flight"); }
  me.copies[me.copy_count++] = {to, from, me.copy_group};
}
void async_commit() {
  ++current->copy_group;
}
// Copies are made as late as the program allows: code that forgets to wait reads what was there before.
void async_wait(unsigned newest) {
  Lane& me = *current;
  unsigned kept = 0;
  for (unsigned i = 0; i < me.copy_count; ++i) {
    const PendingCopy copy = me.copies[i];
    if (copy.group + newest < me.copy_group) {
      if (hooks.copied != nullptr) {
        hooks.copied(copy.from, copy.to, 16, __builtin_return_address(0));
      }
      std::memcpy(copy.to, copy.from, 16);
    } else {
      me.copies[kept++] = copy;
    }
  }
  me.copy_count = kept;
}
void fence() {
  if (hooks.fenced != nullptr) { hooks.fenced(); }
}

std::uint64_t atomic_update(void* address,
                            unsigned bytes,
                            std::uint64_t (*next)(std::uint64_t old, const std::uint64_t* operands),
                            const std::uint64_t* operands) {
  if (hooks.atomic != nullptr && current != nullptr) {
    hooks.atomic(address, bytes, __builtin_return_address(0));
  }
  if (current != nullptr) { maybe_change_over(); }
  std::uint64_t old = 0;
  std::memcpy(&old, address, bytes);
  const std::uint64_t value = next(old, operands);
  std::memcpy(address, &value, bytes);
  return old;
}

void* static_shared_memory(const void* key, std::size_t bytes) {
  Block& b = *current->block;
  for (const SharedArray& a : b.arrays) {
    if (a.key == key) { return a.memory; }
  }
  b.static_bytes += bytes;
  check_shared(b);
  void* const memory = device_allocate(bytes, "shared memory");
  if (hooks.remove != nullptr) {
    hooks.remove(memory);
    hooks.add(memory, bytes, "shared memory", true);
  }
  b.arrays.push_back({key, memory});
  return memory;
}
void* dynamic_shared() {
  Block& b = *current->block;
  if (b.dynamic == nullptr) { fail("dynamic shared memory, but the launch asked for none"); }
  return b.dynamic;
}

void* device_allocate(std::size_t bytes, const char* name) {
  void* const p = ::operator new(bytes, std::align_val_t(256));
  std::memset(p, 0xFF, bytes);  // NaN, -1: makes reads before the first write visible
  if (hooks.add != nullptr) { hooks.add(p, bytes, name, false); }
  return p;
}
void device_free(void* p) {
  if (hooks.remove != nullptr) { hooks.remove(p); }
  ::operator delete(p, std::align_val_t(256));
}
void device_written(const void* p, std::size_t bytes) {
  if (hooks.written != nullptr) { hooks.written(p, bytes); }
}

std::vector<Launch>& launches() {
  static std::vector<Launch> list;
  return list;
}

Kernel kernel_state(const void* kernel) {
  const std::lock_guard lock(kernels_mutex);
  return kernels()[{device, kernel}];
}
void unload_kernels() {
  const std::lock_guard lock(kernels_mutex);
  kernels().clear();
}

cudaError_t admit(const Launch& launch) noexcept {
  const dim3 block = launch.block;
  const dim3 grid = launch.grid;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > most_threads || block.z > 64) {
    return refuse("invalid block size");
  }
  if (blocks == 0 || grid.x > 0x7FFF'FFFFU || grid.y > 65535 || grid.z > 65535) {
    return refuse("invalid grid size");
  }
  if (launch.dynamic_bytes > block_shared_bytes) {
    return refuse("too much dynamic shared memory");
  }
  if (current != nullptr) { return refuse("a kernel launches a kernel"); }
  {
    const std::lock_guard lock(kernels_mutex);
    Kernel& kernel = kernels()[{device, launch.kernel}];
    if (capture != nullptr && !kernel.loaded) {
      return refuse("a capture would load a kernel", cudaErrorStreamCaptureUnsupported);
    }
    kernel.loaded = true;
  }
  launches().push_back(launch);
  return cudaSuccess;
}

cudaError_t run_grid(const Launch& launch, void (*entry)(void*), void* arguments) noexcept {
  const dim3 block = launch.block;
  const dim3 grid = launch.grid;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  last_message.clear();
  last_failed = false;
  if (hooks.launched != nullptr) { hooks.launched(); }
  static const auto machine = std::make_unique<Block>();
  static std::vector<Lane> lanes;
  Block& b = *machine;
  b.entry = entry;
  b.arguments = arguments;
  b.dynamic_bytes = launch.dynamic_bytes;
  b.shared_limit = kernel_state(launch.kernel).shared_limit;
  b.static_bytes = 0;
  b.random = options().seed * 0x9E37'79B9'7F4A'7C15U | 1U;
  const auto limit = static_cast<std::size_t>(std::max(0, b.shared_limit));
  if (launch.dynamic_bytes > std::max(static_shared_bytes, limit)) {
    return refuse("dynamic shared memory beyond the kernel's limit", cudaErrorInvalidValue);
  }
  std::vector<std::uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0U);
  if (options().schedule == Schedule::reverse) { std::reverse(order.begin(), order.end()); }
  if (options().schedule == Schedule::random) {
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[(next_random(b) >> 11U) % i]);
    }
  }
  geometry.block_dim = block;
  geometry.grid_dim = grid;
  for (const std::uint32_t i : order) {
    geometry.block = {i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)};
    b.linear = i;
    run_block(b, lanes, block, launch.dynamic_bytes);
    if (last_failed) { return cudaErrorLaunchFailure; }
    if (!launches().empty() && launches().back().kernel == launch.kernel) {
      std::size_t& seen = launches().back().static_bytes;
      seen = std::max(seen, b.static_bytes);
    }
  }
  return cudaSuccess;
}

}  // namespace kvtrim::emulator

using namespace kvtrim::emulator;

cudaError_t cudaGetDevice(int* now) {
  *now = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) {
    *value = multiprocessors;
  } else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) {
    *value = static_cast<int>(block_shared_bytes);
  } else {
    return refuse("an attribute that the emulator does not have", cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  const std::lock_guard lock(kernels_mutex);
  Kernel& known = kernels()[{device, kernel}];
  if (capture != nullptr && !known.loaded) {
    return refuse("a capture would load a kernel", cudaErrorStreamCaptureUnsupported);
  }
  known.loaded = true;
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (capture != nullptr) {
    return refuse("an attribute is set in a capture", cudaErrorStreamCaptureUnsupported);
  }
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<std::size_t>(value) > block_shared_bytes) {
    return refuse("an attribute that cannot be set", cudaErrorInvalidValue);
  }
  const std::lock_guard lock(kernels_mutex);
  Kernel& known = kernels()[{device, kernel}];
  known.loaded = true;
  known.shared_limit = value;
  ++known.times_set;
  return cudaSuccess;
}
