// SPDX-License-Identifier: Apache-2.0
// Makes the process that runs the tests of this folder one rank of several, where KVTRIM_TEST_RANKS says so. Twice the header:
// it must be self-contained.
#include <kvtrim/parallel/mpi.hpp>

#include <kvtrim/parallel/mpi.hpp>

#include "parallel/ranks.hpp"

#include <chrono>
#include <cstdlib>
#include <optional>

namespace {

// From before main until after it.
class Session {
 public:
  Session() {
    if (std::getenv("KVTRIM_TEST_RANKS") == nullptr) { return; }
    MPI_Init(nullptr, nullptr);
    MPI_Comm_dup(MPI_COMM_WORLD, &own_);
    MPI_Comm_set_errhandler(own_, MPI_ERRORS_RETURN);
    communicator_.emplace(own_, std::chrono::seconds(120));
    kvtrim::test::mpi = &*communicator_;
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    if (!communicator_) { return; }
    // A rank whose test failed leaves the others waiting, and they fail too: nobody finalises.
    if (communicator_->is_broken()) { MPI_Abort(MPI_COMM_WORLD, 1); }
    communicator_.reset();
    MPI_Comm_free(&own_);
    MPI_Finalize();
  }

 private:
  MPI_Comm own_ = MPI_COMM_NULL;
  std::optional<kvtrim::MpiCommunicator> communicator_;
};
const Session session;

}  // namespace
