// SPDX-License-Identifier: Apache-2.0

// Finds races and reads of memory never written, exactly, for the current run. The kernels are compiled with
// -fsanitize=thread, which makes the compiler call __tsan_read/write before every access; the program is linked without
// it and gets those functions from here. So no shadow memory of the real tool is involved.
//
// Two accesses of a launch are ordered if one thread made both, if a __syncthreads of their block lies between, or a
// __syncwarp of their whole warp. Shuffles and votes order no memory. Blocks are ordered only by __threadfence and an
// atomic on one side, an atomic on the same address on the other (the "last block" idiom). Launches are ordered.

#include "machine.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using namespace kvtrim::emulator;

// Who did it, and when: the thread (0: nobody), its block's and its warp's epoch.
struct Access {
  std::uint32_t thread = 0;  // block * 1024 + thread + 1
  std::uint32_t block_epoch = 0;
  std::uint32_t warp_epoch = 0;
  void* caller = nullptr;
};
// The readers of a cell since its last write, summed up: one thread, threads of one warp in one epoch, of one block, of
// several blocks.
enum class Readers : std::uint8_t { none, one, warp, block, grid };
struct Cell {
  Access write;
  Access read;
  std::uint32_t write_launch = 0;
  std::uint32_t read_launch = 0;
  Readers readers = Readers::none;
  bool atomic = false;
  bool written = false;
};
struct Region {
  std::uintptr_t begin;
  std::uintptr_t end;
  std::string name;
  bool shared;
  unsigned shift;  // log2 of the bytes of a cell
  std::vector<Cell> cells;
};

// What a block knows of another one: all before an epoch of it, and one thread's share of that epoch.
struct Known {
  std::uint32_t epoch = 0;
  std::uint32_t thread = 0;
};
using Knowledge = std::map<std::uint32_t, Known>;

struct State {
  std::map<std::uintptr_t, Region> regions;  // by end
  Region* last = nullptr;
  std::uint32_t launch = 1;
  std::map<std::uint32_t, Knowledge> known;      // by block
  std::map<std::uintptr_t, Knowledge> released;  // by the atomic's address
  std::map<std::uint32_t, bool> fenced;          // threads
  // Cells that several blocks read: the last epoch of each, and the thread that read in it; 0: several.
  std::unordered_map<std::uintptr_t, std::vector<std::pair<std::uint32_t, Known>>> shared;
};
State& state() {
  static State s;
  return s;
}

Region* region_of(std::uintptr_t a) {
  State& s = state();
  if (s.last != nullptr && a >= s.last->begin && a < s.last->end) { return s.last; }
  const auto it = s.regions.upper_bound(a);
  if (it == s.regions.end() || a < it->second.begin) { return nullptr; }
  return s.last = &it->second;
}

// file:line of a return address, by addr2line; "?" where there is none.
std::string place_of(void* caller) {
  Dl_info info;
  if (caller == nullptr || dladdr(caller, &info) == 0) { return "?"; }
  char line[512];
  std::snprintf(
      line,
      sizeof line,
      "addr2line -i -e '%s' 0x%lx 2>/dev/null",
      info.dli_fname,
      static_cast<unsigned long>(static_cast<char*>(caller) - static_cast<char*>(info.dli_fbase)) -
          1UL);
  std::string place = "?";
  if (FILE* pipe = popen(line, "r"); pipe != nullptr) {
    while (std::fgets(line, sizeof line, pipe) != nullptr) {
      place = line;
      if (place.find("emulator.hpp") == std::string::npos &&
          place.find("device.hpp") == std::string::npos) {
        break;
      }
    }
    pclose(pipe);
  }
  place.resize(std::min(place.size(), place.find_first_of(" \n")));
  const auto slash = place.rfind('/');
  return slash == std::string::npos ? place : place.substr(slash + 1);
}

std::uint32_t block_of(const Access& a) {
  return (a.thread - 1) / 1024;
}
std::uint32_t warp_of(const Access& a) {
  return (a.thread - 1) / 32;
}
std::string text_of(const Access& a) {
  const std::uint32_t t = (a.thread - 1) % 1024;
  return "block " + std::to_string(block_of(a)) + " thread " + std::to_string(t) + " (warp " +
         std::to_string(t / 32) + ") at " + place_of(a.caller);
}

// Whether all that `past` stands for happened before `now`.
bool before(const Access& past, const Access& now, Readers who) {
  if (who == Readers::grid) { return false; }
  if (block_of(past) != block_of(now)) {
    const auto mine = state().known.find(block_of(now));
    if (mine == state().known.end()) { return false; }
    const auto other = mine->second.find(block_of(past));
    if (other == mine->second.end()) { return false; }
    const Known& k = other->second;
    return past.block_epoch < k.epoch ||
           (who == Readers::one && past.thread == k.thread && past.block_epoch == k.epoch);
  }
  if (who == Readers::one && past.thread == now.thread) { return true; }
  if (past.block_epoch < now.block_epoch) { return true; }
  return who != Readers::block && warp_of(past) == warp_of(now) && past.warp_epoch < now.warp_epoch;
}

void note_reader(std::uintptr_t at, const Access& who, bool alone) {
  auto& list = state().shared[at];
  const std::uint32_t thread = alone ? who.thread : 0;
  for (auto& [block, last] : list) {
    if (block != block_of(who)) { continue; }
    if (last.epoch < who.block_epoch) {
      last = {who.block_epoch, thread};
    } else if (last.epoch == who.block_epoch && last.thread != thread) {
      last.thread = 0;
    }
    return;
  }
  list.push_back({block_of(who), {who.block_epoch, thread}});
}
// Whether all reads of a cell by several blocks happened before `now`.
bool readers_before(std::uintptr_t at, const Access& now) {
  State& s = state();
  const auto list = s.shared.find(at);
  if (list == s.shared.end()) { return false; }
  const Knowledge& known = s.known[block_of(now)];
  return std::all_of(list->second.begin(), list->second.end(), [&](const auto& read) {
    const auto& [block, last] = read;
    if (block == block_of(now)) {
      return last.epoch < now.block_epoch || last.thread == now.thread;
    }
    const auto other = known.find(block);
    return other != known.end() && last.epoch < other->second.epoch;
  });
}

[[noreturn]] void hazard(
    const char* kind, const Region& r, std::uintptr_t at, const Access& past, const Access& now) {
  fail(std::string("racecheck: ") + kind + " hazard on " + r.name + " + " +
       std::to_string(at - r.begin) + " bytes\n  earlier: " + text_of(past) +
       "\n  now:     " + text_of(now));
}

void note_atomic(const Access& now, std::uintptr_t address) {
  State& s = state();
  const auto merge = [](Knowledge& to, const Knowledge& from) {
    for (const auto& [block, k] : from) {
      if (Known& own = to[block]; k.epoch >= own.epoch) { own = k; }
    }
  };
  Knowledge& released = s.released[address];
  Knowledge& known = s.known[block_of(now)];
  merge(known, released);
  if (s.fenced.contains(now.thread)) {
    merge(released, known);
    released[block_of(now)] = {now.block_epoch, now.thread};
  }
}

void check(const void* p, unsigned bytes, bool write, bool atomic, void* caller) {
  Lane& me = *current;
  const auto a = reinterpret_cast<std::uintptr_t>(p);
  if (a - reinterpret_cast<std::uintptr_t>(me.stack) < me.stack_bytes) { return; }
  Region* const r = region_of(a);
  if (r == nullptr) {
    if (write) {
      fail("memcheck: a write to memory that is neither shared nor a device_buffer, at " +
           place_of(caller));
    }
    return;
  }
  if (a + bytes > r->end) {
    fail("memcheck: an access beyond the end of " + r->name + ", at " + place_of(caller));
  }
  const std::uintptr_t offset = a - r->begin;
  const auto needed = static_cast<unsigned>(std::countr_zero(offset | bytes));
  if (needed <
      r->shift) {  // the first narrow access splits the cells: neighbours in a word do not race
    std::vector<Cell> finer((r->end - r->begin + (1U << needed) - 1) >> needed);
    for (std::size_t i = 0; i < finer.size(); ++i) {
      finer[i] = r->cells[i << needed >> r->shift];
      if (finer[i].readers != Readers::grid || finer[i].read_launch != state().launch) { continue; }
      const auto whole = state().shared.find(r->begin + (i << needed >> r->shift << r->shift));
      if (whole == state().shared.end()) { continue; }
      const auto list = whole->second;
      state().shared[r->begin + (i << needed)] = list;
    }
    r->cells.swap(finer);
    r->shift = needed;
  }
  const Access now{
      me.block->linear * 1024 + me.linear + 1, me.block->epoch, me.warp->epoch, caller};
  if (atomic && !r->shared) { note_atomic(now, a); }
  const std::uint32_t launch = state().launch;
  const std::size_t last = (offset + bytes + (1U << r->shift) - 1) >> r->shift;
  for (std::size_t i = offset >> r->shift; i < last; ++i) {
    Cell& c = r->cells[i];
    const std::uintptr_t at = r->begin + (i << r->shift);
    if (c.write_launch == launch && !(c.atomic && atomic) && !before(c.write, now, Readers::one)) {
      hazard(write ? "write-after-write" : "read-after-write", *r, at, c.write, now);
    }
    const bool read_before = c.read_launch == launch && c.readers != Readers::none;
    if (write) {
      if (read_before && !(c.readers == Readers::grid ? readers_before(at, now)
                                                      : before(c.read, now, c.readers))) {
        hazard("write-after-read", *r, at, c.read, now);
      }
      if (atomic && !c.written) {
        fail("initcheck: an atomic on " + r->name + " + " + std::to_string(at - r->begin) +
             " that was never written, at " + place_of(caller));
      }
      c.write = now;
      c.write_launch = launch;
      c.atomic = atomic;
      c.written = true;
      if (c.readers == Readers::grid) { state().shared.erase(at); }
      c.readers = Readers::none;
      continue;
    }
    if (!c.written) {
      fail("initcheck: a read of " + r->name + " + " + std::to_string(at - r->begin) +
           " bytes that were never written, at " + place_of(caller));
    }
    if (!read_before || before(c.read, now, c.readers)) {
      c.readers = Readers::one;
      c.read = now;
      c.read_launch = launch;
    } else if (c.read.thread != now.thread || c.readers != Readers::one) {
      const bool same_block = block_of(c.read) == block_of(now) && c.readers != Readers::grid;
      const bool same_warp = same_block && warp_of(c.read) == warp_of(now) &&
                             c.read.warp_epoch == now.warp_epoch && c.readers <= Readers::warp;
      if (!same_block) {
        if (c.readers != Readers::grid) { note_reader(at, c.read, c.readers == Readers::one); }
        note_reader(at, now, true);
      }
      c.readers = same_warp ? Readers::warp : same_block ? Readers::block : Readers::grid;
      c.read.block_epoch = std::max(c.read.block_epoch, now.block_epoch);
    }
  }
}

void plain(const void* p, unsigned bytes, bool write, void* caller) {
  if (current == nullptr || current == &current->block->host || inside_instruction) { return; }
  check(p, bytes, write, false, caller);
}

const bool installed = [] {
  hooks.atomic = [](const void* p, unsigned bytes, void* caller) {
    check(p, bytes, true, true, caller);
  };
  hooks.copied = [](const void* from, void* to, unsigned bytes, void* caller) {
    check(from, bytes, false, false, caller);
    check(to, bytes, true, false, caller);
  };
  hooks.add = [](const void* p, std::size_t bytes, const char* name, bool shared) {
    const auto a = reinterpret_cast<std::uintptr_t>(p);
    if (bytes == 0) { return; }
    state().regions.emplace(
        a + bytes, Region{a, a + bytes, name, shared, 2, std::vector<Cell>((bytes + 3) / 4)});
    state().last = nullptr;
  };
  hooks.remove = [](const void* p) {
    if (const Region* r = region_of(reinterpret_cast<std::uintptr_t>(p)); r != nullptr) {
      state().regions.erase(r->end);
      state().last = nullptr;
    }
  };
  hooks.written = [](const void* p, std::size_t bytes) {
    const auto a = reinterpret_cast<std::uintptr_t>(p);
    Region* const r = region_of(a);
    if (r == nullptr || bytes == 0) { return; }
    const std::size_t end = (a - r->begin + bytes + (1U << r->shift) - 1) >> r->shift;
    for (std::size_t i = (a - r->begin) >> r->shift; i < end; ++i) { r->cells[i].written = true; }
  };
  hooks.launched = [] {
    State& s = state();
    ++s.launch;
    s.shared.clear();
    s.known.clear();
    s.released.clear();
    s.fenced.clear();
  };
  hooks.fenced = [] { state().fenced[current->block->linear * 1024 + current->linear + 1] = true; };
  return true;
}();

}  // namespace

// --- what -fsanitize=thread makes the compiler call ----------------------------------------------------
#define KVTRIM_CALLER __builtin_return_address(0)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define KVTRIM_ACCESS(n)                    \
  void __tsan_read##n(void* p) {            \
    plain(p, n, false, KVTRIM_CALLER);      \
  }                                         \
  void __tsan_write##n(void* p) {           \
    plain(p, n, true, KVTRIM_CALLER);       \
  }                                         \
  void __tsan_unaligned_read##n(void* p) {  \
    plain(p, n, false, KVTRIM_CALLER);      \
  }                                         \
  void __tsan_unaligned_write##n(void* p) { \
    plain(p, n, true, KVTRIM_CALLER);       \
  }                                         \
  void __tsan_volatile_read##n(void* p) {   \
    plain(p, n, false, KVTRIM_CALLER);      \
  }                                         \
  void __tsan_volatile_write##n(void* p) {  \
    plain(p, n, true, KVTRIM_CALLER);       \
  }                                         \
  void __tsan_read_write##n(void* p) {      \
    plain(p, n, false, KVTRIM_CALLER);      \
    plain(p, n, true, KVTRIM_CALLER);       \
  }
KVTRIM_ACCESS(1)
KVTRIM_ACCESS(2)
KVTRIM_ACCESS(4)
KVTRIM_ACCESS(8)
KVTRIM_ACCESS(16)
void __tsan_read_range(void* p, unsigned long n) {
  if (n != 0) { plain(p, static_cast<unsigned>(n), false, KVTRIM_CALLER); }
}
void __tsan_write_range(void* p, unsigned long n) {
  if (n != 0) { plain(p, static_cast<unsigned>(n), true, KVTRIM_CALLER); }
}
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  if (n != 0) {
    plain(from, static_cast<unsigned>(n), false, KVTRIM_CALLER);
    plain(to, static_cast<unsigned>(n), true, KVTRIM_CALLER);
  }
  return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
  if (n != 0) {
    plain(from, static_cast<unsigned>(n), false, KVTRIM_CALLER);
    plain(to, static_cast<unsigned>(n), true, KVTRIM_CALLER);
  }
  return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  if (n != 0) { plain(to, static_cast<unsigned>(n), true, KVTRIM_CALLER); }
  return std::memset(to, value, n);
}
// Atomics of the tests' own host code; kernels use CUDA's.
#define KVTRIM_ATOMIC(bits, T)                                                            \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                          \
  }                                                                                       \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                             \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                       \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) {                             \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                   \
  }                                                                                       \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                            \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                    \
  }                                                                                       \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) {                            \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                    \
  }                                                                                       \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* c, T v, int, int) { \
    return __atomic_compare_exchange_n(p, c, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);   \
  }                                                                                       \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* c, T v, int, int) {   \
    return __atomic_compare_exchange_n(p, c, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);   \
  }
KVTRIM_ATOMIC(8, unsigned char)
KVTRIM_ATOMIC(16, unsigned short)
KVTRIM_ATOMIC(32, unsigned)
KVTRIM_ATOMIC(64, unsigned long)
void __tsan_atomic_thread_fence(int) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int) {}
}
