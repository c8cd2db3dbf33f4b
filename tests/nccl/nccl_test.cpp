// SPDX-License-Identifier: Apache-2.0
// NcclCommunicator over an emulated NCCL: its functions are defined here, for ranks that are all in this thread, on ordinary
// memory. Between ncclGroupStart and ncclGroupEnd they gather what the ranks call, as the real ones do.
#include <kvtrim/cuda/parallel/nccl.hpp>

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/parallel/context_top_k.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <vector>

struct ncclComm {
  int index;
  int count;
};

namespace {

struct Call {
  bool gather;
  const void* from;
  void* to;
  std::size_t count;
  ncclDataType_t type;
  ncclRedOp_t how;
  const ncclComm* rank;
  cudaStream_t stream;
};
std::vector<Call> calls;  // of the open group
ncclResult_t next_result = ncclSuccess;
int groups = 0;

ncclResult_t take(const Call& call) {
  if (next_result == ncclSuccess || next_result == ncclInProgress) { calls.push_back(call); }
  return next_result;
}

// What the ranks called, all of it alike.
void exchange() {
  if (calls.empty()) { return; }
  const Call& first = calls.front();
  REQUIRE(calls.size() == static_cast<std::size_t>(first.rank->count));
  for (std::size_t r = 0; r < calls.size(); ++r) {
    const Call& c = calls[r];
    REQUIRE(c.type == ncclUint64);
    REQUIRE((c.gather == first.gather && c.count == first.count && c.how == first.how));
    REQUIRE(c.rank->index == static_cast<int>(r));
    REQUIRE(c.from ==
            static_cast<std::uint64_t*>(c.to) + (c.gather ? c.count * r : 0));  // in place
  }
  const std::size_t words = first.count * (first.gather ? calls.size() : 1);
  std::vector<std::uint64_t> all(words, 0);
  for (std::size_t r = 0; r < calls.size(); ++r) {
    const auto* const from = static_cast<const std::uint64_t*>(calls[r].from);
    for (std::size_t i = 0; i < first.count; ++i) {
      if (first.gather) {
        all[r * first.count + i] = from[i];
      } else {
        all[i] = first.how == ncclMax ? std::max(all[i], from[i]) : all[i] + from[i];
      }
    }
  }
  for (const Call& c : calls) {
    std::copy(all.begin(), all.end(), static_cast<std::uint64_t*>(c.to));
  }
  calls.clear();
}

}  // namespace

extern "C" {
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->index;
  return next_result;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->count;
  return next_result;
}
ncclResult_t ncclGroupStart() {
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  ++groups;
  exchange();
  return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void* from,
                           void* to,
                           std::size_t count,
                           ncclDataType_t type,
                           ncclRedOp_t how,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  return take({false, from, to, count, type, how, comm, stream});
}
ncclResult_t ncclAllGather(const void* from,
                           void* to,
                           std::size_t count,
                           ncclDataType_t type,
                           ncclComm_t comm,
                           cudaStream_t stream) {
  return take({true, from, to, count, type, ncclSum, comm, stream});
}
}

using namespace kvtrim;
using cuda::NcclCommunicator;

TEST_CASE("nccl: a call is in place, in 64-bit integers, on the stream, over all ranks", "[nccl]") {
  next_result = ncclSuccess;
  ncclComm ranks[] = {{0, 3}, {1, 3}, {2, 3}};
  const auto stream = reinterpret_cast<cudaStream_t>(std::uintptr_t{64});
  std::vector<std::vector<std::uint64_t>> words;
  const auto each = [&](auto&& call) {
    REQUIRE(ncclGroupStart() == ncclSuccess);
    for (std::size_t r = 0; r < 3; ++r) {
      NcclCommunicator c(&ranks[r], stream);
      CHECK((c.rank().index == static_cast<int>(r) && c.rank().count == 3));
      CHECK(call(c, words[r]) == Status::ok);
      CHECK(c.error() == ncclSuccess);
      CHECK(calls.back().stream == stream);
    }
    REQUIRE(ncclGroupEnd() == ncclSuccess);
    CHECK((words[1] == words[0] && words[2] == words[0]));
    return words[0];
  };
  const std::uint64_t high = std::uint64_t{1}
                             << 63;  // compared without a sign, added without a limit
  using Words = std::vector<std::uint64_t>;
  words = {{1, high, 7}, {2, high, 0}, {3, 1, high}};
  CHECK(each([](auto& c, auto& w) { return c.sum(w); }) == Words{6, 1, high + 7});
  words = {{1, high, 7}, {2, 5, 0}, {3, 1, high}};
  CHECK(each([](auto& c, auto& w) { return c.max(w); }) == Words{3, high, high});
  words = {{1, 2, 0, 0, 0, 0}, {0, 0, 3, 4, 0, 0}, {0, 0, 0, 0, 5, 6}};
  CHECK(each([](auto& c, auto& w) { return c.all_gather(w); }) == Words{1, 2, 3, 4, 5, 6});
}

TEST_CASE("nccl: rounds of an algorithm give every rank what one rank has",
          "[nccl][context_top_k]") {
  next_result = ncclSuccess;
  std::mt19937 rng(1);
  constexpr std::int32_t rows = 500;
  constexpr int count = 4;
  std::vector<std::uint64_t> all;
  std::vector<std::vector<std::uint64_t>> own(count);
  for (std::int32_t p = 0; p < rows; ++p) {
    all.push_back(row_key(static_cast<float>(rng() % 50), Position{p}));
    own[rng() % 3].push_back(all.back());  // the last rank has none
  }
  const RankedDemand demand{rows, rows, 100, {}};
  ncclComm ranks[] = {{0, count}, {1, count}, {2, count}, {3, count}};
  std::vector<NcclCommunicator> communicators;
  std::vector<ContextTopK> runs;
  for (std::size_t r = 0; r < count; ++r) {
    communicators.emplace_back(&ranks[r], nullptr);
    const std::span<const std::uint64_t> keys(own[r]);
    runs.emplace_back(std::span(&demand, 1), std::span(&keys, 1));
  }
  groups = 0;
  while (true) {
    std::vector<Round> rounds;
    for (ContextTopK& run : runs) { rounds.push_back(run.next()); }
    if (!rounds.front()) { break; }
    REQUIRE(ncclGroupStart() == ncclSuccess);
    for (std::size_t r = 0; r < count; ++r) {
      REQUIRE(exchange(communicators[r], rounds[r]) == Status::ok);
    }
    REQUIRE(ncclGroupEnd() == ncclSuccess);
  }
  CHECK(groups == 8);
  std::vector<std::uint64_t> best = all;
  std::sort(best.begin(), best.end(), std::greater<>());
  for (ContextTopK& run : runs) {
    CHECK(run.status() == Status::ok);
    for (const std::uint64_t key : all) {
      if (run.keeps(0, key) != (key >= best[99])) { FAIL_CHECK("key " << key); }
    }
  }
}

TEST_CASE("nccl: an error is kept, and every later call refused", "[nccl][fault]") {
  next_result = ncclSuccess;
  ncclComm rank{0, 1};
  std::vector<std::uint64_t> words{1, 2};
  NcclCommunicator c(&rank, nullptr);
  next_result = ncclInProgress;  // of a communicator that does not block
  CHECK(c.sum(words) == Status::ok);
  next_result = ncclRemoteError;
  CHECK(c.max(words) == Status::rank_missing);
  CHECK(c.error() == ncclRemoteError);
  next_result = ncclSuccess;
  calls.clear();
  CHECK(c.sum(words) == Status::rank_missing);
  CHECK(c.max(words) == Status::rank_missing);
  CHECK(c.all_gather(words) == Status::rank_missing);
  CHECK(calls.empty());  // nothing reached NCCL
  CHECK(c.error() == ncclRemoteError);

  next_result = ncclInvalidArgument;
  const NcclCommunicator unknown(&rank, nullptr);
  CHECK((unknown.rank().index == 0 && unknown.rank().count == 1));
  CHECK(unknown.error() == ncclInvalidArgument);
  next_result = ncclSuccess;
}
