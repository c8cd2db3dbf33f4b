// SPDX-License-Identifier: Apache-2.0
// The time of one round over MPI on this machine, for the number of words that an eviction's rounds have:
// mpirun -n RANKS kvtrim_round_time

#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/parallel/mpi.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int failed = 0;
  {
    kvtrim::MpiCommunicator communicator(MPI_COMM_WORLD);
    const kvtrim::Rank rank = communicator.rank();
    if (rank.index == 0) {
      std::printf("%d ranks, sum of 64-bit words, 200 rounds each\n", rank.count);
      std::printf(
          "| words | bytes | median, microseconds | slowest tenth from |\n|--:|--:|--:|--:|\n");
    }
    // One denominator; SmolLM2's 90 pairs; a 70B model's 640.
    for (const std::size_t words :
         {std::size_t{1}, std::size_t{90 * 256}, std::size_t{640 * 256}}) {
      std::vector<std::uint64_t> buffer(words, 1);
      std::vector<double> times;
      for (int i = 0; i < 210 && failed == 0; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        failed =
            exchange(communicator, {kvtrim::RoundKind::sum, buffer}) == kvtrim::Status::ok ? 0 : 1;
        const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
        if (i >= 10) { times.push_back(1e6 * time.count()); }
      }
      std::ranges::sort(times);
      if (rank.index == 0 && failed == 0) {
        std::printf("| %zu | %zu | %.0f | %.0f |\n",
                    words,
                    8 * words,
                    times[times.size() / 2],
                    times[times.size() * 9 / 10]);
      }
    }
  }
  MPI_Finalize();
  return failed;
}
