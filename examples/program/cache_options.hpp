// SPDX-License-Identifier: Apache-2.0
#pragma once

// The options of every program that runs a model over a paged cache.

#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>

namespace program {

/// Adds --cache-type, --page-size and --threads, with what the variables hold as defaults.
inline void add_cache_options(CLI::App& app,
                              std::string& cache_type,
                              std::int32_t& page_size,
                              std::int32_t& threads) {
  app.add_option("--cache-type", cache_type, "type of cached keys and values")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  app.add_option("--page-size", page_size, "rows per page")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--threads", threads, "threads; 0: all cores")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

}  // namespace program
