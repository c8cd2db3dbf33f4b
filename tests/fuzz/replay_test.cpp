// SPDX-License-Identifier: Apache-2.0
// Every fuzz target with its committed inputs (tests/data/fuzz/NAME.txt), and with changes of them: in every preset, with
// whatever instrumentation that has.
#include "catch.hpp"
#include "fuzz/fuzz.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

using namespace kvtrim::fuzz;

TEST_CASE("fuzz: every committed input, and changes of them, is taken or refused", "[fuzz]") {
  std::sort(targets().begin(), targets().end(), [](const Target& a, const Target& b) {
    return a.name < b.name;
  });
  REQUIRE(targets().size() >= 2);
  for (const Target& target : targets()) {
    INFO("target " << target.name);
    const auto inputs =
        read_inputs(std::string(KVTRIM_TEST_DATA) + "/fuzz/" + std::string(target.name) + ".txt");
    REQUIRE_FALSE(inputs.empty());
    for (const auto& input : inputs) { target.run(input); }
    kvtrim::test::Random random(1);
    for (std::int32_t run = 0; run < 200; ++run) {
      auto input =
          inputs[static_cast<std::size_t>(random.below(static_cast<std::int32_t>(inputs.size())))];
      input.push_back(static_cast<std::uint8_t>(random.bits()));
      for (std::int32_t n = 1 + random.below(4); n > 0; --n) {
        const auto i =
            static_cast<std::size_t>(random.below(static_cast<std::int32_t>(input.size())));
        input[i] = static_cast<std::uint8_t>(random.bits());
      }
      target.run(input);
    }
  }
  SUCCEED();
}
