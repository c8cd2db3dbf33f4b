// SPDX-License-Identifier: Apache-2.0
#include "sha256.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <ios>
#include <span>
#include <stdexcept>
#include <vector>

#include "program/console.hpp"

namespace evaluate {

namespace {

// The first 32 bits of the fractional parts of roots of the first primes: the standard's constants by their definition.
template <std::size_t N>
std::array<std::uint32_t, N> root_bits(long double (*root)(long double)) {
  std::array<std::uint32_t, N> bits{};
  std::size_t found = 0;
  for (std::uint32_t n = 2; found < N; ++n) {
    bool prime = true;
    for (std::uint32_t d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    const long double x = root(n);
    if (prime) bits[found++] = static_cast<std::uint32_t>((x - std::floor(x)) * 4294967296.0L);
  }
  return bits;
}

class Sha256 {
 public:
  // 64 bytes.
  void block(const unsigned char* data) {
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i)
      w[i] = std::uint32_t{data[4 * i]} << 24U | std::uint32_t{data[4 * i + 1]} << 16U |
             std::uint32_t{data[4 * i + 2]} << 8U | std::uint32_t{data[4 * i + 3]};
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3U) + w[i - 7] +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10U);
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                ((e & f) ^ (~e & g)) + round_[i] + w[i];
      const std::uint32_t two =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    const std::array<std::uint32_t, 8> now{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state_[i] += now[i];
  }

  [[nodiscard]] std::string hex() const {
    std::string text;
    for (const std::uint32_t word : state_) {
      std::array<char, 9> digits{};
      std::snprintf(digits.data(), digits.size(), "%08x", word);
      text += digits.data();
    }
    return text;
  }

 private:
  std::array<std::uint32_t, 64> round_ = root_bits<64>(std::cbrt);
  std::array<std::uint32_t, 8> state_ = root_bits<8>(std::sqrt);
};

}  // namespace

std::string sha256_of_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  Sha256 hash;
  std::vector<unsigned char> bytes(1U << 20U);
  std::uint64_t total = 0;
  for (bool end = false; !end;) {
    program::check_interrupt();
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    auto size = static_cast<std::size_t>(in.gcount());
    total += size;
    end = size < bytes.size();
    std::vector<unsigned char> last;
    std::span<const unsigned char> data(bytes.data(), size);
    if (end) {  // a bit of 1, zeros, and the length in bits
      if (!in.is_open() || in.bad() || !in.eof()) throw std::runtime_error("cannot read " + path);
      last.assign(data.begin(), data.end());
      last.push_back(0x80);
      while (last.size() % 64 != 56) last.push_back(0);
      for (int shift = 56; shift >= 0; shift -= 8)
        last.push_back(static_cast<unsigned char>(total * 8 >> static_cast<unsigned>(shift)));
      data = last;
    }
    for (std::size_t at = 0; at < data.size(); at += 64) hash.block(data.data() + at);
  }
  return hash.hex();
}

}  // namespace evaluate
