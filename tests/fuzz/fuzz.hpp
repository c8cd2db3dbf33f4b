// SPDX-License-Identifier: Apache-2.0
#pragma once

// A fuzz target is a function of bytes. libFuzzer calls it (clang's build), and the test `fuzz` calls all of them with the
// committed inputs and some of its own.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvtrim::fuzz {

using Bytes = std::span<const std::uint8_t>;
struct Target {
  std::string_view name;
  void (*run)(Bytes);
};

/// Those of the program.
inline std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}

/// Committed inputs: one a line, in hexadecimal (`od -An -v -tx1 FILE | tr -d ' \\n'` makes one of a file).
inline std::vector<std::vector<std::uint8_t>> read_inputs(const std::string& path) {
  std::vector<std::vector<std::uint8_t>> all;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    auto& input = all.emplace_back();
    for (std::size_t i = 0; i + 1 < line.size(); i += 2) {
      input.push_back(static_cast<std::uint8_t>(std::stoi(line.substr(i, 2), nullptr, 16)));
    }
  }
  return all;
}

/// What must hold for whatever input.
inline void require(bool right, const char* what) {
  if (right) { return; }
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

/// An input, read from its front; zeros behind its end.
class Reader {
 public:
  explicit Reader(Bytes bytes) : bytes_(bytes) {}
  [[nodiscard]] bool empty() const { return bytes_.empty(); }
  [[nodiscard]] Bytes rest() const { return bytes_; }
  template <class T>
  T number() {
    T x{};
    const std::size_t n = bytes_.size() < sizeof(T) ? bytes_.size() : sizeof(T);
    if (n > 0) { std::memcpy(&x, bytes_.data(), n); }
    bytes_ = bytes_.subspan(n);
    return x;
  }
  /// The last byte, so that what is read from the front stays as it is; 0: there is none.
  std::uint8_t last() {
    if (bytes_.empty()) { return 0; }
    const std::uint8_t x = bytes_.back();
    bytes_ = bytes_.first(bytes_.size() - 1);
    return x;
  }
  /// 0 .. n-1.
  std::int32_t below(std::int32_t n) { return number<std::uint8_t>() % n; }
  bool coin() { return below(2) == 1; }

 private:
  Bytes bytes_;
};

}  // namespace kvtrim::fuzz

/// `KVTRIM_FUZZ_TARGET(name) { ... input ... }` in name_fuzz.cpp.
#ifdef KVTRIM_LIBFUZZER
// The committed inputs become files of the folder that libFuzzer reads: KVTRIM_FUZZ_INPUTS, and its first argument.
extern "C" [[gnu::used]] inline int LLVMFuzzerInitialize(int* argc, char*** argv) {
  const char* const path = std::getenv("KVTRIM_FUZZ_INPUTS");
  if (path == nullptr || *argc < 2) { return 0; }
  std::size_t number = 0;
  for (const auto& input : kvtrim::fuzz::read_inputs(path)) {
    std::ofstream out(std::string((*argv)[1]) + "/committed_" + std::to_string(number++));
    out.write(reinterpret_cast<const char*>(input.data()),
              static_cast<std::streamsize>(input.size()));
  }
  return 0;
}
#  define KVTRIM_FUZZ_TARGET(target)                                                    \
    static void target##_target(kvtrim::fuzz::Bytes input);                             \
    extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) { \
      target##_target({data, size});                                                    \
      return 0;                                                                         \
    }                                                                                   \
    static void target##_target(kvtrim::fuzz::Bytes input)
#else
#  define KVTRIM_FUZZ_TARGET(target)                                           \
    static void target##_target(kvtrim::fuzz::Bytes input);                    \
    [[maybe_unused]] static const bool target##_known =                        \
        (kvtrim::fuzz::targets().push_back({#target, target##_target}), true); \
    static void target##_target(kvtrim::fuzz::Bytes input)
#endif
