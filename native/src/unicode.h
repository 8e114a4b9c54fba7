// Character classes of the pre-tokenizers, and strict UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dagserve {

enum class CharClass : std::uint8_t { other, letter, number, space };

struct Char {
  std::uint32_t code_point;
  std::uint32_t bytes;
};

// The character at `position` of valid UTF-8.
inline Char decode_char(std::string_view text, std::size_t position) {
  const auto at = [&](std::size_t i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(text[position + i]));
  };
  const std::uint32_t first = at(0);
  if (first < 0x80) return {first, 1};
  if (first < 0xE0) return {(first & 0x1F) << 6 | (at(1) & 0x3F), 2};
  if (first < 0xF0) return {(first & 0x0F) << 12 | (at(1) & 0x3F) << 6 | (at(2) & 0x3F), 3};
  return {(first & 0x07) << 18 | (at(1) & 0x3F) << 12 | (at(2) & 0x3F) << 6 | (at(3) & 0x3F), 4};
}

CharClass class_of(std::uint32_t code_point);
bool is_numeric(std::uint32_t code_point);  // what the Digits pre-tokenizer splits off

// Byte offset of the first sequence that is not UTF-8 (overlong forms and surrogates included), or npos.
std::size_t find_invalid_utf8(std::string_view text);

}  // namespace dagserve
