// SPDX-License-Identifier: Apache-2.0
// The real NCCL with one rank, as one GPU allows no more: a selection over ranks is queued and captured into a graph, and
// nothing is read back before its end.
#include <kvtrim/cuda/parallel/context_top_k.cuh>
#include <kvtrim/cuda/parallel/nccl.hpp>

#include "device_buffer.hpp"

#include "catch.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using kvtrim::test::DeviceBuffer;

TEST_CASE("nccl: a selection over one rank is that rank's, straight and in a graph", "[nccl]") {
  constexpr std::int32_t rows = 10'000;
  constexpr std::int32_t wanted = 1000;
  ncclUniqueId id;
  ncclComm_t world = nullptr;
  cudaStream_t stream = nullptr;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  REQUIRE(ncclCommInitRank(&world, 1, id, 0) == ncclSuccess);
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  cuda::NcclCommunicator communicator(world, stream);
  REQUIRE((communicator.error() == ncclSuccess && communicator.rank().count == 1));

  std::vector<float> values;
  for (std::int32_t r = 0; r < rows; ++r) { values.push_back(static_cast<float>(r * 7919 % rows)); }
  DeviceBuffer<float> scores(values);
  DeviceBuffer<cuda::RankedTask> tasks({{rows, -1, 0, rows, rows, wanted, rows}});
  DeviceBuffer<std::uint8_t> stays(rows);
  DeviceBuffer<Status> statuses(1);
  const cuda::SelectBounds bounds{1, 1, 1, rows};
  DeviceBuffer<std::byte> workspace(cuda::ContextTopK::workspace_bytes(bounds));
  cuda::RowScores by_score;
  by_score.scores = SequencePlane::dense(scores.data(), 1, 1, rows);
  const auto queue = [&] {
    cuda::ContextTopK run(by_score,
                          tasks.data(),
                          bounds,
                          stays.data(),
                          statuses.data(),
                          workspace.data(),
                          workspace.size(),
                          stream);
    const Status status = drive(communicator, run);
    return run.error() == cudaSuccess ? status : Status::bad_options;
  };
  const auto check = [&] {
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(statuses.download().front() == Status::ok);
    const auto got = stays.download();
    for (std::int32_t r = 0; r < rows; ++r) {
      const bool best = values[static_cast<std::size_t>(r)] >= static_cast<float>(rows - wanted);
      if (got[static_cast<std::size_t>(r)] != (best ? 1 : 0)) { FAIL_CHECK("row " << r); }
    }
  };
  REQUIRE(queue() == Status::ok);
  check();
  stays.fill(0x5A);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  const Status captured = queue();
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  REQUIRE(captured == Status::ok);
  REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  REQUIRE(cudaGraphLaunch(executable, stream) == cudaSuccess);
  check();
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  CHECK(ncclCommDestroy(world) == ncclSuccess);
  cudaStreamDestroy(stream);
}
