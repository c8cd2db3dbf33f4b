// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the ready-made sinks have in common: counts of a page's owners, and a list of what has none left.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail {

// Takes an owner off the count at `index`. True: the page has no other, or nobody counts. A count below 1 frees nothing.
[[nodiscard]] inline bool drop_reference(std::int32_t* ref_counts, std::int64_t index) noexcept {
  if (ref_counts == nullptr) { return true; }
  std::int32_t& count = ref_counts[index];
  if (count <= 0) { return false; }
  --count;
  return count == 0;
}

// Appends to the caller's memory; if that is too small, the rest is only counted.
template <class T>
class FreedList {
 public:
  explicit FreedList(std::span<T> memory) noexcept : memory_(memory) {}
  void add(T value) noexcept {
    if (count_ < memory_.size()) { memory_[count_] = value; }
    ++count_;
  }
  [[nodiscard]] std::span<const T> all() const noexcept {
    return memory_.first(std::min(count_, memory_.size()));
  }

 private:
  std::span<T> memory_;
  std::size_t count_ = 0;
};

}  // namespace kvtrim::detail
