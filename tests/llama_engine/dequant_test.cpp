// SPDX-License-Identifier: Apache-2.0
#include "llama_engine/dequant.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "catch.hpp"

namespace {

std::vector<std::byte> from_hex(const std::string& text) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoul(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

const engine::TensorTypeTraits& by_name(const std::string& name) {
  const auto* it = std::find_if(engine::tensor_types.begin(),
                                engine::tensor_types.end(),
                                [&](const auto& traits) { return traits.name == name; });
  REQUIRE(it != engine::tensor_types.end());
  return *it;
}

}  // namespace

TEST_CASE("dequantise: every type gives exactly the values of PyPI's gguf", "[dequant][parity]") {
  std::ifstream in(KVTRIM_TEST_DATA "/engine/dequant_blocks.txt");
  std::set<std::string> seen;
  std::string name;
  std::string block_text;
  std::string value_text;
  while (in >> name >> block_text >> value_text) {
    INFO(name);
    const engine::TensorTypeTraits& traits = by_name(name);
    const auto blocks = from_hex(block_text);
    const auto expected_bytes = from_hex(value_text);
    std::vector<float> expected(expected_bytes.size() / sizeof(float));
    std::memcpy(expected.data(), expected_bytes.data(), expected_bytes.size());
    REQUIRE(blocks.size() / traits.block_bytes * traits.block_elements == expected.size());
    std::vector<float> values(expected.size());
    engine::dequantise(traits.type, blocks, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (values[i] != expected[i]) {
        INFO("element " << i);
        REQUIRE(values[i] == expected[i]);
      }
    }
    seen.insert(name);
  }
  CHECK(seen.size() == engine::tensor_types.size());
}

TEST_CASE("dequantise: the type table finds each type by the file's number and no other",
          "[dequant][edge]") {
  std::size_t found = 0;
  for (std::uint32_t type = 0; type < 64; ++type) {
    if (const auto* traits = engine::find_tensor_type(type); traits != nullptr) {
      CHECK(static_cast<std::uint32_t>(traits->type) == type);
      ++found;
    }
  }
  CHECK(found == engine::tensor_types.size());
}
