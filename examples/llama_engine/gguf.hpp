// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads a GGUF file (version 3, little-endian): metadata by key, tensors by name. Nothing in the file is trusted: every count,
// length and offset is compared with the bytes that are left before it is used, by subtraction, so that no sum can overflow.
// Every error is a std::runtime_error that starts with the file's name.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "dequant.hpp"

namespace engine {

/// One metadata value. All integer types become int64 (an unsigned value of 2^63 or more wraps), all floats double.
using GgufValue = std::variant<std::int64_t,
                               double,
                               bool,
                               std::string,
                               std::vector<std::int64_t>,
                               std::vector<double>,
                               std::vector<std::string>>;

/// One tensor: `shape[0]` is the contiguous dimension, as in the file. `bytes` is a view into the `GgufFile`.
struct GgufTensor {
  std::vector<std::uint64_t> shape;
  TensorType type = TensorType::f32;
  std::uint64_t elements = 0;
  std::span<const std::byte> bytes;
};

/// "576 x 1536", for messages.
[[nodiscard]] inline std::string shape_text(std::span<const std::uint64_t> shape) {
  std::string text;
  for (const std::uint64_t n : shape) text += (text.empty() ? "" : " x ") + std::to_string(n);
  return text.empty() ? "scalar" : text;
}

namespace detail {

[[noreturn]] inline void fail(const std::string& file, const std::string& what) {
  throw std::runtime_error(file + ": " + what);
}

/// A position in a byte array; refuses to go past its end.
class ByteReader {
 public:
  ByteReader(const std::string& file, std::span<const std::byte> bytes)
      : file_(file), bytes_(bytes) {}

  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }
  [[nodiscard]] std::uint64_t left() const noexcept { return bytes_.size() - offset_; }

  /// The next `n` bytes. \throws std::runtime_error if fewer are left
  std::span<const std::byte> take(std::uint64_t n, const std::string& what) {
    if (n > left()) {
      fail(file_,
           "truncated: " + what + " needs " + std::to_string(n) + " bytes at byte " +
               std::to_string(offset_) + ", the file has " + std::to_string(bytes_.size()));
    }
    const auto result = bytes_.subspan(offset_, n);
    offset_ += n;
    return result;
  }

  template <class T>
  T number(const std::string& what) {
    T value{};
    std::memcpy(&value, take(sizeof(T), what).data(), sizeof(T));
    return value;
  }

  std::string string(const std::string& what) {
    const auto length = number<std::uint64_t>("the length of " + what);
    const auto bytes = take(length, what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  /// A count of things that take at least `each` bytes: refused when they cannot fit, before anything is allocated.
  std::uint64_t count(std::uint64_t each, const std::string& what) {
    const auto n = number<std::uint64_t>("the number of " + what);
    if (n > left() / each) {
      fail(file_,
           "truncated or damaged: " + std::to_string(n) + " " + what + " announced at byte " +
               std::to_string(offset_ - 8) + ", but only " + std::to_string(left()) +
               " bytes follow");
    }
    return n;
  }

 private:
  const std::string& file_;
  std::span<const std::byte> bytes_;
  std::uint64_t offset_ = 0;
};

enum class ValueType : std::uint32_t {
  u8 = 0,
  i8 = 1,
  u16 = 2,
  i16 = 3,
  u32 = 4,
  i32 = 5,
  f32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  u64 = 10,
  i64 = 11,
  f64 = 12,
};

template <class T>
[[nodiscard]] constexpr std::string_view value_type_name() noexcept {
  if constexpr (std::is_same_v<T, std::int64_t>) return "integer";
  if constexpr (std::is_same_v<T, double>) return "float";
  if constexpr (std::is_same_v<T, bool>) return "bool";
  if constexpr (std::is_same_v<T, std::string>) return "string";
  if constexpr (std::is_same_v<T, std::vector<std::int64_t>>) return "array of integers";
  if constexpr (std::is_same_v<T, std::vector<double>>) return "array of floats";
  if constexpr (std::is_same_v<T, std::vector<std::string>>) return "array of strings";
  return "value";
}

/// Reads the metadata values that follow one another in the head of the file.
class ValueReader {
 public:
  ValueReader(const std::string& file, ByteReader& reader) : file_(file), reader_(reader) {}

  GgufValue read(const std::string& key) {
    const auto type = ValueType{reader_.number<std::uint32_t>("the type of " + key)};
    if (type == ValueType::array) return array(key);
    if (type == ValueType::string) return reader_.string(key);
    if (type == ValueType::boolean) return reader_.number<std::uint8_t>(key) != 0;
    if (is_float(type)) return floating(type, key);
    return integer(type, key);
  }

 private:
  static bool is_float(ValueType type) { return type == ValueType::f32 || type == ValueType::f64; }

  double floating(ValueType type, const std::string& key) {
    return type == ValueType::f32 ? double{reader_.number<float>(key)}
                                  : reader_.number<double>(key);
  }

  std::int64_t integer(ValueType type, const std::string& key) {
    switch (type) {
      case ValueType::u8:
      case ValueType::boolean:
        return reader_.number<std::uint8_t>(key);
      case ValueType::i8:
        return reader_.number<std::int8_t>(key);
      case ValueType::u16:
        return reader_.number<std::uint16_t>(key);
      case ValueType::i16:
        return reader_.number<std::int16_t>(key);
      case ValueType::u32:
        return reader_.number<std::uint32_t>(key);
      case ValueType::i32:
        return reader_.number<std::int32_t>(key);
      case ValueType::u64:
      case ValueType::i64:
        return reader_.number<std::int64_t>(key);
      default:
        fail(file_,
             "key " + key + " has the unknown value type " +
                 std::to_string(static_cast<std::uint32_t>(type)));
    }
  }

  GgufValue array(const std::string& key) {
    const auto type = ValueType{reader_.number<std::uint32_t>("the element type of " + key)};
    const auto n = reader_.count(type == ValueType::string ? 8 : 1, "elements of " + key);
    if (type == ValueType::array) fail(file_, "key " + key + " is an array of arrays");
    if (type == ValueType::string) {
      return elements<std::string>(n, [&] { return reader_.string(key); });
    }
    if (is_float(type)) return elements<double>(n, [&] { return floating(type, key); });
    return elements<std::int64_t>(n, [&] { return integer(type, key); });
  }

  template <class T, class Next>
  static std::vector<T> elements(std::uint64_t n, Next next) {
    std::vector<T> values;
    values.reserve(n);  // at most a small multiple of the file: count() has checked n
    for (std::uint64_t i = 0; i < n; ++i) values.push_back(next());
    return values;
  }

  const std::string& file_;
  ByteReader& reader_;
};

}  // namespace detail

/// A GGUF file in memory. Tensor views live as long as the object; it can be moved, not copied.
///
/// \par Thread-safety
/// const calls from many
class GgufFile {
 public:
  /// Reads a file.
  ///
  /// \throws std::runtime_error if it cannot be read or is not a sound GGUF file of known tensor types
  explicit GgufFile(const std::string& path) : GgufFile(path, read_all(path)) {}

  /// Parses bytes that are already in memory; `name` stands for the file's name in messages.
  GgufFile(std::string name, std::vector<std::byte> bytes)
      : name_(std::move(name)), bytes_(std::move(bytes)) {
    parse();
  }

  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;
  GgufFile(GgufFile&&) noexcept = default;
  GgufFile& operator=(GgufFile&&) noexcept = default;
  ~GgufFile() = default;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::map<std::string, GgufTensor>& tensors() const noexcept {
    return tensors_;
  }
  [[nodiscard]] bool has(const std::string& key) const { return values_.contains(key); }

  /// The value of a key; null if the file does not have it.
  ///
  /// \tparam T an alternative of `GgufValue`
  /// \throws std::runtime_error if the key has another type
  template <class T>
  [[nodiscard]] const T* find(const std::string& key) const {
    const auto it = values_.find(key);
    if (it == values_.end()) return nullptr;
    if (const T* value = std::get_if<T>(&it->second)) return value;
    const auto stored = std::visit(
        [](const auto& v) { return detail::value_type_name<std::decay_t<decltype(v)>>(); },
        it->second);
    fail("key " + key + " is of type " + std::string(stored) + ", expected " +
         std::string(detail::value_type_name<T>()));
  }

  /// The value of a key that must be there.
  ///
  /// \throws std::runtime_error if the key is missing or has another type
  template <class T>
  [[nodiscard]] const T& get(const std::string& key) const {
    const T* value = find<T>(key);
    if (value == nullptr) {
      fail("missing key " + key + " (" + std::string(detail::value_type_name<T>()) + ")");
    }
    return *value;
  }

  /// A tensor that must be there, with the shape it must have (contiguous dimension first).
  ///
  /// \throws std::runtime_error if it is missing or has another shape
  [[nodiscard]] const GgufTensor& tensor(const std::string& tensor_name,
                                         std::span<const std::uint64_t> shape) const {
    const auto it = tensors_.find(tensor_name);
    if (it == tensors_.end()) {
      fail("missing tensor " + tensor_name + ", expected shape " + shape_text(shape));
    }
    if (!std::equal(shape.begin(), shape.end(), it->second.shape.begin(), it->second.shape.end())) {
      fail("tensor " + tensor_name + " has shape " + shape_text(it->second.shape) + ", expected " +
           shape_text(shape));
    }
    return it->second;
  }

  /// Throws an error about this file.
  [[noreturn]] void fail(const std::string& what) const { detail::fail(name_, what); }

 private:
  static std::vector<std::byte> read_all(const std::string& path) {
    std::ifstream in(path, std::ios::binary | std::ios::ate);
    const auto size = in ? static_cast<std::int64_t>(in.tellg()) : -1;
    // A folder can be opened, and claims to be 2^63 - 1 bytes long.
    if (size < 0 || size == std::numeric_limits<std::int64_t>::max()) {
      detail::fail(path, "cannot be opened as a file");
    }
    std::vector<std::byte> bytes(static_cast<std::size_t>(size));
    in.seekg(0);
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
    if (!in) detail::fail(path, "reading " + std::to_string(size) + " bytes failed");
    return bytes;
  }

  void parse() {
    detail::ByteReader reader(name_, bytes_);
    const auto magic = reader.take(4, "the magic number");
    if (std::memcmp(magic.data(), "GGUF", 4) != 0) fail("not a GGUF file (no GGUF magic number)");
    const auto version = reader.number<std::uint32_t>("the version");
    if (version != 3) {
      fail("GGUF version " + std::to_string(version) +
           (version == 0x03000000U ? " (a big-endian file)" : "") +
           " is not supported, expected 3");
    }
    const auto tensor_count = reader.number<std::uint64_t>("the number of tensors");
    const auto key_count = reader.count(13, "metadata keys");
    detail::ValueReader values(name_, reader);
    for (std::uint64_t i = 0; i < key_count; ++i) {
      std::string key = reader.string("metadata key " + std::to_string(i));
      GgufValue value = values.read(key);
      if (!values_.emplace(key, std::move(value)).second) fail("duplicate key " + key);
    }
    // The header of a tensor takes at least 24 bytes: name length, dimensions, type, offset.
    if (tensor_count > reader.left() / 24) {
      fail("truncated or damaged: " + std::to_string(tensor_count) +
           " tensors announced, but only " + std::to_string(reader.left()) +
           " bytes follow the metadata");
    }
    std::map<std::string, std::uint64_t> offsets;
    for (std::uint64_t i = 0; i < tensor_count; ++i) {
      const std::string tensor_name = reader.string("the name of tensor " + std::to_string(i));
      GgufTensor tensor = tensor_head(reader, tensor_name);
      offsets[tensor_name] = reader.number<std::uint64_t>("the offset of tensor " + tensor_name);
      if (!tensors_.emplace(tensor_name, std::move(tensor)).second) {
        fail("duplicate tensor " + tensor_name);
      }
    }
    place_tensors(reader.offset(), offsets);
  }

  GgufTensor tensor_head(detail::ByteReader& reader, const std::string& tensor_name) const {
    const auto what = "the shape of tensor " + tensor_name;
    const auto dims = reader.number<std::uint32_t>(what);
    if (dims > 4) {
      fail("tensor " + tensor_name + " has " + std::to_string(dims) + " dimensions, at most 4");
    }
    GgufTensor tensor;
    tensor.elements = 1;
    for (std::uint32_t d = 0; d < dims; ++d) {
      const auto n = tensor.shape.emplace_back(reader.number<std::uint64_t>(what));
      if (n == 0 || tensor.elements > std::numeric_limits<std::int64_t>::max() / n) {
        fail("tensor " + tensor_name + " has the impossible shape " + shape_text(tensor.shape));
      }
      tensor.elements *= n;
    }
    const auto type = reader.number<std::uint32_t>("the type of tensor " + tensor_name);
    const TensorTypeTraits* traits = find_tensor_type(type);
    if (traits == nullptr) {
      fail("tensor " + tensor_name + " has the unknown type " + std::to_string(type) +
           "; known are " + known_tensor_types());
    }
    tensor.type = traits->type;
    const std::uint64_t row = tensor.shape.empty() ? 1 : tensor.shape[0];
    if (row % traits->block_elements != 0) {
      fail("tensor " + tensor_name + " of type " + std::string(traits->name) + " has rows of " +
           std::to_string(row) + ", not a multiple of " + std::to_string(traits->block_elements));
    }
    return tensor;
  }

  /// The data starts at the next multiple of the alignment after the heads.
  void place_tensors(std::uint64_t heads_end, const std::map<std::string, std::uint64_t>& offsets) {
    const std::int64_t* stored = find<std::int64_t>("general.alignment");
    const std::int64_t alignment = stored != nullptr ? *stored : 32;
    if (alignment < 1 || alignment > (1 << 30) || (alignment & (alignment - 1)) != 0) {
      fail("general.alignment is " + std::to_string(alignment) + ", expected a power of two");
    }
    const auto step = static_cast<std::uint64_t>(alignment);
    const std::uint64_t start = (heads_end + step - 1) / step * step;
    const std::uint64_t size = bytes_.size();
    for (auto& [tensor_name, tensor] : tensors_) {
      const TensorTypeTraits& traits = *find_tensor_type(static_cast<std::uint32_t>(tensor.type));
      const std::uint64_t offset = offsets.at(tensor_name);
      const std::uint64_t blocks = tensor.elements / traits.block_elements;
      if (offset % step != 0) {
        fail("tensor " + tensor_name + " starts at offset " + std::to_string(offset) +
             ", not a multiple of the alignment " + std::to_string(step));
      }
      if (start > size || offset > size - start ||
          blocks > (size - start - offset) / traits.block_bytes) {
        fail("tensor " + tensor_name + " (" + shape_text(tensor.shape) + ", " +
             std::string(traits.name) + ") at offset " + std::to_string(offset) +
             " of the data at byte " + std::to_string(start) + " does not fit into the file of " +
             std::to_string(size) + " bytes");
      }
      tensor.bytes =
          std::span<const std::byte>(bytes_).subspan(start + offset, blocks * traits.block_bytes);
    }
  }

  std::string name_;
  std::vector<std::byte> bytes_;
  std::map<std::string, GgufValue> values_;
  std::map<std::string, GgufTensor> tensors_;
};

}  // namespace engine
