// SPDX-License-Identifier: Apache-2.0
// What an eviction over many ranks exchanges, as the table in README.md beside it. Without arguments: the table; with --count:
// the same algorithms on 256 ranks in this process, which must exchange what the formula says.

#include "traffic.hpp"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

namespace {

using kvtrim_bench::Eviction;
using kvtrim_bench::Exchange;

std::string bytes(std::int64_t n) {
  char text[32];
  const auto x = static_cast<double>(n);
  if (n < 10'000) {
    std::snprintf(text, sizeof(text), "%lld B", static_cast<long long>(n));
  } else if (n < 10'000'000) {
    std::snprintf(text, sizeof(text), "%.0f kB", x / 1e3);
  } else if (n < 10'000'000'000) {
    std::snprintf(text, sizeof(text), "%.0f MB", x / 1e6);
  } else {
    std::snprintf(text, sizeof(text), "%.0f GB", x / 1e9);
  }
  return text;
}

std::string cell(const Exchange& x) {
  return std::to_string(x.rounds) + " / " + bytes(x.own) + " / " + bytes(x.received);
}

void table() {
  Eviction first;  // a prompt's end, the window's LSE not known: SnapKV's own kernel
  first.window = 32;
  first.kernel = 5;
  Eviction step;  // H2O, each step
  step.later = true;
  Eviction pages;  // whole pages, their scores not pooled, so that pages may lie on ranks in turn
  pages.pages = true;
  pages.window = 16;
  pages.spread = kvtrim::Spread::page_striped;
  Eviction pooled = pages;  // the default of `page`
  pooled.kernel = 9;
  std::printf(
      "| ranks | tokens | rows of a rank | `snapkv`, contiguous | `h2o`, a step | `page`, striped, "
      "kernel 1 | `page`, striped, "
      "kernel 9 | window's queries | one decode step |\n"
      "|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n");
  for (const std::int32_t ranks : {8, 64, 512, 4096}) {
    for (const std::int64_t tokens : {131'072LL, 1'048'576LL, 10'485'760LL}) {
      for (Eviction* e : {&first, &step, &pages, &pooled}) {
        e->ranks = ranks;
        e->tokens = tokens;
      }
      const Exchange decode = kvtrim_bench::decode_step_of(first);
      std::printf("| %d | %lld | %lld | %s | %s | %s | %s | %s | %s |\n",
                  ranks,
                  static_cast<long long>(tokens),
                  static_cast<long long>(tokens / ranks),
                  cell(exchange_of(first)).c_str(),
                  cell(exchange_of(step)).c_str(),
                  cell(exchange_of(pages)).c_str(),
                  cell(exchange_of(pooled)).c_str(),
                  bytes(kvtrim_bench::query_bytes_of(first)).c_str(),
                  cell(decode).c_str());
    }
  }
}

bool count() {
  bool equal = true;
  for (const bool pages : {false, true}) {
    for (const bool later : {false, true}) {
      Eviction e;
      e.ranks = 256;
      e.tokens = 65'536;
      e.layers = 8;
      e.pages = pages;
      e.later = later;
      e.kernel = 5;
      const kvtrim::Traffic found = counted(e, 16'384);
      const Exchange formula = exchange_of(e);
      equal = equal && found.rounds == formula.rounds && found.bytes == formula.own;
      std::printf(
          "256 ranks, %lld pairs of %lld rows, %s%s: %lld rounds, %lld B of each rank; formula "
          "%lld, %lld B\n",
          static_cast<long long>(e.pairs()),
          static_cast<long long>(e.tokens),
          pages ? "pages" : "rows",
          later ? ", rows went before" : "",
          static_cast<long long>(found.rounds),
          static_cast<long long>(found.bytes),
          static_cast<long long>(formula.rounds),
          static_cast<long long>(formula.own));
    }
  }
  return equal;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 2 && std::strcmp(argv[1], "--count") == 0) { return count() ? 0 : 1; }
    if (argc == 1) {
      table();
      return 0;
    }
    std::fprintf(stderr, "usage: %s [--count]\n", argv[0]);
  } catch (const std::exception& error) { std::fprintf(stderr, "%s: %s\n", argv[0], error.what()); }
  return 1;
}
