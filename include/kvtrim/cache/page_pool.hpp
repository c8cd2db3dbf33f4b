// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace kvtrim {

/// Hands out the pages of one cache and counts their owners; the page released last is handed out first.
///
/// \par Allocation
/// in the constructor only.
/// \par Thread-safety
/// one thread at a time
class PagePool {
 public:
  /// Makes a pool of `capacity` free pages, numbered from 0.
  ///
  /// \throws std::length_error if `capacity` is negative or does not fit a `PageId`
  /// \par Complexity
  /// O(capacity)
  explicit PagePool(std::int64_t capacity) {
    if (capacity < 0 || capacity > std::numeric_limits<std::int32_t>::max()) {
      throw_length_error("kvtrim::PagePool: capacity {} is not within 0 and {} pages",
                         capacity,
                         std::numeric_limits<std::int32_t>::max());
    }
    counts_.assign(static_cast<std::size_t>(capacity), 0);
    free_.reserve(counts_.size());
    for (std::int64_t p = capacity; p-- > 0;) {
      free_.push_back(PageId{static_cast<std::int32_t>(p)});
    }
  }

  /// Takes a free page; its count becomes 1.
  ///
  /// \returns the page, or `std::nullopt` when none is free
  /// \par Complexity
  /// O(1)
  [[nodiscard]] std::optional<PageId> try_acquire() noexcept {
    if (free_.empty()) { return std::nullopt; }
    const PageId p = free_.back();
    free_.pop_back();
    counts_[index(p)] = 1;
    return p;
  }

  /// Adds an owner to page `p`.
  /// \pre `p` is held
  void retain(PageId p) noexcept {
    KVTRIM_ASSERT(ref_count(p) > 0 && "nobody holds the page");
    ++counts_[index(p)];
  }

  /// Removes an owner from page `p`; a page without owners is free.
  ///
  /// \returns whether the page became free; false for one that nobody holds, or that is not of this pool: nothing was changed
  bool release(PageId p) noexcept {
    if (raw(p) < 0 || index(p) >= counts_.size() || counts_[index(p)] <= 0) { return false; }
    if (--counts_[index(p)] > 0) { return false; }
    free_.push_back(p);  // cannot reallocate: reserved in the constructor
    return true;
  }

  /// Owners of page `p`; 0: free.
  /// \pre `p` is a page of this pool
  [[nodiscard]] std::int32_t ref_count(PageId p) const noexcept {
    KVTRIM_ASSERT(raw(p) >= 0 && index(p) < counts_.size() && "no such page of the pool");
    return counts_[index(p)];
  }
  /// Owners of each page, [capacity]; what `Writable` points to.
  [[nodiscard]] const std::int32_t* ref_counts() const noexcept { return counts_.data(); }
  /// Pages not handed out.
  [[nodiscard]] std::int32_t available() const noexcept {
    return static_cast<std::int32_t>(free_.size());
  }
  /// Total number of pages.
  [[nodiscard]] std::int32_t capacity() const noexcept {
    return static_cast<std::int32_t>(counts_.size());
  }
  /// Pages handed out, shared ones counted once.
  [[nodiscard]] std::int32_t in_use() const noexcept { return capacity() - available(); }

 private:
  static std::size_t index(PageId p) noexcept { return static_cast<std::size_t>(raw(p)); }

  std::vector<std::int32_t> counts_;
  std::vector<PageId> free_;
};

}  // namespace kvtrim
