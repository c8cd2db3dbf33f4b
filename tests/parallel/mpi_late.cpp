// SPDX-License-Identifier: Apache-2.0
// mpi_late late|never: what happens when rank 1 does not arrive in time.
//
// late: rank 1 sleeps for longer than the others wait. They report it, and every further call is refused. Rank 2's
// communicator is destroyed while the call is under way, rank 0's looks until it is complete. Then rank 1 has woken and
// called in, its own call is complete, and all finalise.
// never: the others end the program by MPI_Abort.
#include <kvtrim/parallel/mpi.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

using namespace kvtrim;
using namespace std::chrono_literals;

namespace {

bool failed = false;

void check(bool ok, const char* what, int rank) {
  if (ok) { return; }
  std::fprintf(stderr, "rank %d: not so: %s\n", rank, what);
  failed = true;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const bool comes = argc > 1 && std::strcmp(argv[1], "late") == 0;
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN);
  int rank = 0;
  MPI_Comm_rank(own, &rank);
  using Clock = std::chrono::steady_clock;

  std::optional<MpiCommunicator> first(std::in_place, own, 20s);
  std::vector<std::uint64_t> words{1, 2, 3};
  check(first->sum(words) == Status::ok, "a round before", rank);
  first.reset();

  std::optional<MpiCommunicator> communicator(
      std::in_place, own, rank == 1 ? std::chrono::milliseconds(20s) : 500ms);
  if (rank == 1) {
    std::this_thread::sleep_for(comes ? 2s : 60s);
    // The others still hold their part of it.
    check(communicator->sum(words) == Status::ok, "the late rank's call is complete", rank);
    check(words == std::vector<std::uint64_t>{9, 18, 27}, "with the words of all", rank);
  } else {
    const auto begin = Clock::now();
    const Status status = communicator->sum(words);
    const auto took = Clock::now() - begin;
    check(status == Status::rank_missing, "the missing rank is reported", rank);
    check(took >= 500ms && took < 1900ms, "after the deadline, and before it comes", rank);
    check(communicator->is_broken(), "broken", rank);
    const auto refused = Clock::now();
    check(communicator->max(words) == Status::rank_missing, "max refused", rank);
    check(communicator->all_gather(words) == Status::rank_missing, "all_gather refused", rank);
    check(communicator->sum(words) == Status::rank_missing, "sum refused", rank);
    check(Clock::now() - refused < 250ms, "at once", rank);
    if (!comes) { MPI_Abort(MPI_COMM_WORLD, 3); }
  }
  while (rank == 0 && !communicator->is_complete()) { std::this_thread::sleep_for(1ms); }
  const auto end = Clock::now();
  communicator.reset();
  check(Clock::now() - end < 250ms, "the destructor does not wait", rank);
  const std::vector<std::uint64_t> churn(3, 7);  // takes memory that was freed
  MPI_Finalize();
  check(churn == std::vector<std::uint64_t>(3, 7), "nothing was written to memory of others", rank);
  if (rank == 0 && !failed) { std::puts("late: ok"); }
  return failed ? 1 : 0;
}
