// SPDX-License-Identifier: Apache-2.0
#include "llama_engine/gguf.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "gguf_builder.hpp"
#include "llama_engine/chat.hpp"

using Catch::Matchers::ContainsSubstring;
using engine::GgufFile;
using engine_test::Bytes;
using engine_test::GgufBuilder;
using engine_test::head;
using engine_test::Writer;

namespace {

constexpr std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();

GgufBuilder small_file() {
  GgufBuilder builder;
  builder.string("name", "small")
      .u32("count", 7)
      .f32("ratio", 0.5F)
      .boolean("flag", true)
      .strings("words", {"a", "", "bc"})
      .i32s("numbers", {-1, 2})
      .tensor("first", {2, 3}, {1, 2, 3, 4, 5, 6})
      .tensor("second", {4}, {7, 8, 9, 10});
  return builder;
}

/// The message of the error that parsing ends with; empty if there is none.
std::string error_of(Bytes bytes) {
  try {
    GgufFile file("test.gguf", std::move(bytes));
    return "";
  } catch (const std::runtime_error& error) { return error.what(); }
}

/// The head of one tensor called "t".
Writer one_tensor(std::vector<std::uint64_t> shape, std::uint32_t type, std::uint64_t offset) {
  Writer out = head(1, 0);
  out.string("t").number(static_cast<std::uint32_t>(shape.size()));
  for (const std::uint64_t n : shape) out.number(n);
  out.number(type).number(offset);
  return out;
}

}  // namespace

TEST_CASE("gguf: keys of every kind and tensors come back as written", "[gguf]") {
  const GgufFile file = small_file().file();
  CHECK(file.get<std::string>("name") == "small");
  CHECK(file.get<std::int64_t>("count") == 7);
  CHECK(file.get<double>("ratio") == 0.5);
  CHECK(file.get<bool>("flag"));
  CHECK(file.get<std::vector<std::string>>("words") == std::vector<std::string>{"a", "", "bc"});
  CHECK(file.get<std::vector<std::int64_t>>("numbers") == std::vector<std::int64_t>{-1, 2});
  CHECK(file.find<std::string>("absent") == nullptr);
  const std::vector<std::uint64_t> shape{2, 3};
  const auto& tensor = file.tensor("first", shape);
  std::vector<float> values(6);
  engine::dequantise(tensor.type, tensor.bytes, values);
  CHECK(values == std::vector<float>{1, 2, 3, 4, 5, 6});
}

TEST_CASE("gguf: views into the file survive a move", "[gguf]") {
  GgufFile first = small_file().file();
  const auto bytes = first.tensors().at("second").bytes;
  const GgufFile second = std::move(first);
  CHECK(second.tensors().at("second").bytes.data() == bytes.data());
}

TEST_CASE("gguf: a file that ends early is an error at every byte", "[gguf][edge]") {
  const Bytes whole = small_file().bytes();
  REQUIRE(error_of(whole).empty());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    // A vector of exactly this size: the sanitiser catches a read past it.
    const std::string error =
        error_of(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    INFO("cut at byte " << size);
    CHECK_THAT(error, ContainsSubstring("test.gguf: "));
  }
}

TEST_CASE("gguf: a damaged byte never crashes the reader", "[gguf][edge]") {
  const Bytes whole = small_file().bytes();
  std::size_t refused = 0;
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const unsigned value : {0x00U, 0x7FU, 0x80U, 0xFFU}) {
      Bytes damaged = whole;
      damaged[at] = static_cast<std::byte>(value);
      refused += error_of(std::move(damaged)).empty() ? 0 : 1;
    }
  }
  CHECK(refused > 0);
}

TEST_CASE("gguf: a file of another kind is refused by name", "[gguf][edge]") {
  Bytes bytes = small_file().bytes();
  bytes[0] = std::byte{'X'};
  CHECK_THAT(error_of(bytes), ContainsSubstring("test.gguf: not a GGUF file"));
  CHECK_THAT(error_of({}), ContainsSubstring("truncated"));
}

TEST_CASE("gguf: another version is refused with its number", "[gguf][edge]") {
  CHECK_THAT(error_of(head(0, 0, 2).bytes()), ContainsSubstring("version 2 is not supported"));
  CHECK_THAT(error_of(head(0, 0, 0x03000000U).bytes()), ContainsSubstring("big-endian"));
}

TEST_CASE("gguf: counts beyond the file are refused before memory is requested", "[gguf][edge]") {
  CHECK_THAT(error_of(head(0, huge).bytes()), ContainsSubstring(std::to_string(huge)));
  CHECK_THAT(error_of(head(huge, 0).bytes()), ContainsSubstring(std::to_string(huge)));
  CHECK_THAT(error_of(head(huge / 24 + 2, 0).bytes()), ContainsSubstring("tensors announced"));
  // A string of 2^64 - 1 bytes, and one whose end would wrap around to inside the file.
  Writer name = head(0, 1);
  name.number(huge).number(std::uint64_t{0}).number(std::uint64_t{0});
  CHECK_THAT(error_of(name.bytes()), ContainsSubstring("truncated"));
  for (const std::uint64_t n : {huge, huge / 8 + 1, std::uint64_t{1000}}) {
    for (const std::uint32_t type : {0U, 5U, 8U, 12U}) {
      Writer array = head(0, 1);
      array.string("key").number(std::uint32_t{9}).number(type).number(n).number(std::uint64_t{0});
      CHECK_THAT(error_of(array.bytes()), ContainsSubstring("truncated"));
    }
  }
}

TEST_CASE("gguf: value types that do not exist are refused with the key", "[gguf][edge]") {
  Writer scalar = head(0, 1);
  scalar.string("key").number(std::uint32_t{13}).number(std::uint64_t{0});
  CHECK_THAT(error_of(scalar.bytes()), ContainsSubstring("key has the unknown value type 13"));
  Writer nested = head(0, 1);
  nested.string("key").number(std::uint32_t{9}).number(std::uint32_t{9}).number(std::uint64_t{0});
  CHECK_THAT(error_of(nested.bytes()), ContainsSubstring("array of arrays"));
}

TEST_CASE("gguf: a key of another type is an error that names both types", "[gguf][edge]") {
  const GgufFile file = small_file().file();
  CHECK_THROWS_WITH(file.get<double>("count"),
                    "test.gguf: key count is of type integer, expected float");
  CHECK_THROWS_WITH(file.get<std::int64_t>("nothing"), "test.gguf: missing key nothing (integer)");
}

TEST_CASE("gguf: two keys or tensors of one name are refused", "[gguf][edge]") {
  Writer keys = head(0, 2);
  for (int i = 0; i < 2; ++i)
    keys.string("twice").number(std::uint32_t{4}).number(std::uint32_t{1});
  CHECK_THAT(error_of(keys.bytes()), ContainsSubstring("duplicate key twice"));
  Writer tensors = head(2, 0);
  for (int i = 0; i < 2; ++i) {
    tensors.string("t").number(std::uint32_t{1}).number(std::uint64_t{1});
    tensors.number(std::uint32_t{0}).number(std::uint64_t{0});
  }
  tensors.number(std::uint64_t{0}).number(std::uint64_t{0}).number(std::uint64_t{0});
  CHECK_THAT(error_of(tensors.bytes()), ContainsSubstring("duplicate tensor t"));
}

TEST_CASE("gguf: a tensor type that is not known is refused with the list of those that are",
          "[gguf][edge]") {
  const std::string error = error_of(one_tensor({256}, 10, 0).bytes());
  CHECK_THAT(error, ContainsSubstring("tensor t has the unknown type 10"));
  CHECK_THAT(error, ContainsSubstring("F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K"));
}

TEST_CASE("gguf: shapes that cannot be are refused", "[gguf][edge]") {
  const std::uint64_t half = std::uint64_t{1} << 32U;
  CHECK_THAT(error_of(one_tensor({half, half}, 0, 0).bytes()),
             ContainsSubstring("impossible shape"));
  CHECK_THAT(error_of(one_tensor({4, 0}, 0, 0).bytes()),
             ContainsSubstring("impossible shape 4 x 0"));
  CHECK_THAT(error_of(one_tensor({huge}, 0, 0).bytes()), ContainsSubstring("impossible shape"));
  CHECK_THAT(error_of(one_tensor({1, 1, 1, 1, 1}, 0, 0).bytes()),
             ContainsSubstring("5 dimensions"));
  CHECK_THAT(error_of(one_tensor({33}, 3, 0).bytes()), ContainsSubstring("not a multiple of 32"));
}

TEST_CASE("gguf: a tensor that lies outside the file is refused with the numbers", "[gguf][edge]") {
  for (const std::uint64_t offset : {std::uint64_t{32}, std::uint64_t{1} << 62U, huge - 31}) {
    Writer out = one_tensor({4}, 0, offset);
    for (int i = 0; i < 100; ++i) out.number(std::uint8_t{0});
    Bytes bytes = out.bytes();
    bytes.resize(64 + 32);
    const std::string error = error_of(bytes);
    CHECK_THAT(error, ContainsSubstring("does not fit into the file of 96 bytes"));
    CHECK_THAT(error, ContainsSubstring(std::to_string(offset)));
  }
  CHECK_THAT(error_of(one_tensor({4}, 0, 4).bytes()),
             ContainsSubstring("multiple of the alignment"));
}

TEST_CASE("gguf: a missing tensor is named with the shape it should have", "[gguf][edge]") {
  const GgufFile file = small_file().file();
  const std::vector<std::uint64_t> shape{576, 1536};
  CHECK_THROWS_WITH(file.tensor("blk.0.ffn_up.weight", shape),
                    "test.gguf: missing tensor blk.0.ffn_up.weight, expected shape 576 x 1536");
  CHECK_THROWS_WITH(file.tensor("first", shape),
                    "test.gguf: tensor first has shape 2 x 3, expected 576 x 1536");
}

TEST_CASE("gguf: an alignment that is not a power of two is refused", "[gguf][edge]") {
  CHECK(error_of(GgufBuilder().u32("general.alignment", 64).bytes()).empty());
  for (const std::uint32_t alignment : {0U, 24U, 0xFFFFFFFFU}) {
    CHECK_THAT(error_of(GgufBuilder().u32("general.alignment", alignment).bytes()),
               ContainsSubstring("expected a power of two"));
  }
}

TEST_CASE("gguf: a file on disk is read whole, a folder or nothing is an error", "[gguf][edge]") {
  const auto folder = std::filesystem::temp_directory_path();
  const auto path =
      folder / ("kvtrim_gguf_test_" + std::to_string(std::random_device{}()) + ".gguf");
  const Bytes bytes = small_file().bytes();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  const std::string name = GgufFile(path.string()).get<std::string>("name");
  std::filesystem::remove(path);
  CHECK(name == "small");
  CHECK_THROWS_WITH(GgufFile(path.string()), ContainsSubstring(path.string() + ": "));
  CHECK_THROWS_WITH(GgufFile(folder.string()), ContainsSubstring("cannot be opened as a file"));
}

TEST_CASE("chat: a ChatML template is applied with its own system prompt", "[chat]") {
  GgufBuilder builder;
  builder.string("tokenizer.chat_template",
                 "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}<|im_start|>' + role");
  CHECK(engine::apply_chat_template(builder.file(), "Hi") ==
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n");
  builder.string("tokenizer.chat_template", "'<|im_start|>' + message['role']");
  CHECK(engine::apply_chat_template(builder.file(), "Hi") ==
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

TEST_CASE("chat: a model without a known template is refused with the known ones", "[chat][edge]") {
  GgufBuilder builder;
  CHECK_THROWS_WITH(engine::apply_chat_template(builder.file(), "Hi"),
                    ContainsSubstring("no chat template"));
  builder.string("tokenizer.chat_template", "[INST] {{ content }} [/INST]");
  CHECK_THROWS_WITH(engine::apply_chat_template(builder.file(), "Hi"), ContainsSubstring("ChatML"));
}
