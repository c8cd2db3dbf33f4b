// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string_view>
#include <type_traits>

namespace kvtrim::detail {

/// A string literal as a template argument.
template <std::size_t Size>
struct Literal {
  char text[Size]{};

  // Implicit: a literal is what the users of the templates below write.
  consteval Literal(const char (&literal)[Size]) {
    for (std::size_t i = 0; i < Size; ++i) { text[i] = literal[i]; }
  }
};

template <Literal Text>
inline constexpr std::string_view piece{Text.text, sizeof Text.text - 1};
template <class T>
inline constexpr std::string_view name_text = T::name;
template <class T>
inline constexpr std::string_view title_text = T::title;

/// Any number of texts, one after the other, as a constant.
template <const std::string_view&... Pieces>
struct JoinedName {
  static constexpr auto text = [] {
    std::array<char, (Pieces.size() + ... + 0)> out{};
    std::size_t end = 0;
    for (const std::string_view piece : std::initializer_list<std::string_view>{Pieces...}) {
      for (const char c : piece) { out[end++] = c; }
    }
    return out;
  }();
  static constexpr std::string_view value{text.data(), text.size()};
};

/// The name of what is put around something else: "adakv<snapkv>".
template <Literal Word, class Inner>
inline constexpr std::string_view name_around =
    JoinedName<piece<Word>, piece<"<">, name_text<Inner>, piece<">">>::value;

/// The same for what has an inner part by default: the word alone, unless it is another one.
template <Literal Word, class Inner, class Default>
inline constexpr std::string_view name_unless_default =
    std::is_same_v<Inner, Default> ? piece<Word> : name_around<Word, Inner>;

/// What error messages call a decorated score: "kvtrim::PerLayer of kvtrim::KeyDiff".
template <Literal Title, class Inner>
inline constexpr std::string_view title_around =
    JoinedName<piece<Title>, piece<" of ">, title_text<Inner>>::value;

}  // namespace kvtrim::detail
