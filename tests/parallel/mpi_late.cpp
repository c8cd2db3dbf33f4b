// SPDX-License-Identifier: Apache-2.0
// mpi_late late|never: what happens when rank 1 does not arrive in time.
//
// late: rank 1 comes when the others have reported it, and every further call was refused. Rank 2's communicator is destroyed
// before that, while the call is under way; rank 0's looks until it is complete. Rank 1's own call is complete, and all
// finalise. Nothing depends on how fast the machine is: had anyone waited for rank 1, all would hang.
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
  int ranks = 1;
  MPI_Comm_rank(own, &rank);
  MPI_Comm_size(own, &ranks);
  using Clock = std::chrono::steady_clock;

  std::optional<MpiCommunicator> first(std::in_place, own, 120s);
  std::vector<std::uint64_t> words{1, 2, 3};
  check(first->sum(words) == Status::ok, "a round before", rank);
  first.reset();

  std::optional<MpiCommunicator> communicator(
      std::in_place, own, rank == 1 ? std::chrono::milliseconds(120s) : 300ms);
  if (rank == 1) {
    for (int r = 0; r < ranks; ++r) {
      if (r == rank) { continue; }
      MPI_Recv(nullptr, 0, MPI_BYTE, r, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    // The others still hold their part of the call.
    check(communicator->sum(words) == Status::ok, "the late rank's call is complete", rank);
    check(words == std::vector<std::uint64_t>{9, 18, 27}, "with the words of all", rank);
    communicator.reset();
  } else {
    const auto begin = Clock::now();
    check(communicator->sum(words) == Status::rank_missing, "the missing rank is reported", rank);
    check(Clock::now() - begin >= 300ms, "not before the deadline", rank);
    check(communicator->is_broken(), "broken", rank);
    check(!communicator->is_complete(), "under way", rank);
    check(communicator->max(words) == Status::rank_missing, "max is refused", rank);
    check(communicator->all_gather(words) == Status::rank_missing, "all_gather is refused", rank);
    check(communicator->sum(words) == Status::rank_missing, "sum is refused", rank);
    if (!comes) { MPI_Abort(MPI_COMM_WORLD, 3); }
    if (rank == 2) { communicator.reset(); }
    MPI_Send(nullptr, 0, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
    while (rank == 0 && !communicator->is_complete()) { std::this_thread::sleep_for(1ms); }
    communicator.reset();
  }
  const std::vector<std::uint64_t> churn(3, 7);  // takes memory that was freed
  MPI_Finalize();
  check(churn == std::vector<std::uint64_t>(3, 7), "nothing was written to memory of others", rank);
  if (rank == 0 && !failed) { std::puts("late: ok"); }
  return failed ? 1 : 0;
}
