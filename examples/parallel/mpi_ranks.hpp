// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine's floats over MPI. The library's integers have a communicator of their own (kvtrim/parallel/mpi.hpp): MPI lets no
// two of them meet.

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "llama_engine/split.hpp"

namespace parallel {

/// The ranks of an MPI communicator, and the bytes that this one handed to it. An MPI call that fails ends the program, as MPI
/// does by default.
class MpiRanks final : public engine::Ranks {
 public:
  explicit MpiRanks(MPI_Comm communicator) {
    MPI_Comm_dup(communicator, &communicator_);
    int n = 0;
    MPI_Comm_rank(communicator_, &n);
    rank_ = n;
    MPI_Comm_size(communicator_, &n);
    size_ = n;
  }
  ~MpiRanks() override { MPI_Comm_free(&communicator_); }

  [[nodiscard]] std::int32_t rank() const override { return rank_; }
  [[nodiscard]] std::int32_t size() const override { return size_; }

  void sum(std::span<float> numbers) override {
    sent_ += static_cast<std::int64_t>(numbers.size_bytes());
    MPI_Allreduce(MPI_IN_PLACE,
                  numbers.data(),
                  static_cast<int>(numbers.size()),
                  MPI_FLOAT,
                  MPI_SUM,
                  communicator_);
  }
  void gather(std::span<const float> own,
              std::span<const std::int32_t> counts,
              std::span<float> all) override {
    sent_ += static_cast<std::int64_t>(own.size_bytes());
    places_.resize(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), places_.begin(), 0);
    MPI_Allgatherv(own.data(),
                   static_cast<int>(own.size()),
                   MPI_FLOAT,
                   all.data(),
                   counts.data(),
                   places_.data(),
                   MPI_FLOAT,
                   communicator_);
  }
  void sum_parts(std::span<const float> all,
                 std::span<const std::int32_t> counts,
                 std::span<float> own) override {
    sent_ += static_cast<std::int64_t>(all.size_bytes());
    MPI_Reduce_scatter(all.data(), own.data(), counts.data(), MPI_FLOAT, MPI_SUM, communicator_);
  }

  /// Bytes that this rank handed over, of all calls.
  [[nodiscard]] std::int64_t sent() const noexcept { return sent_; }

 private:
  MPI_Comm communicator_ = MPI_COMM_NULL;
  std::int32_t rank_ = 0;
  std::int32_t size_ = 1;
  std::int64_t sent_ = 0;
  std::vector<int> places_;
};

}  // namespace parallel
