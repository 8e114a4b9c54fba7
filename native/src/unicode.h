// Strict UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dagserve {

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

// Where the character that ends at `end` of valid UTF-8 begins.
inline std::size_t previous_char(std::string_view text, std::size_t end) {
  do --end;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  return end;
}

// Writes a character as UTF-8. Returns the end of what was written.
inline char* encode_char(std::uint32_t code_point, char* out) {
  const auto put = [&](std::uint32_t byte) { *out++ = static_cast<char>(byte); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
  }
  if (code_point >= 0x80) put(0x80 | (code_point & 0x3F));
  return out;
}

// How many bytes at the start of `text`, which does not begin with UTF-8, are the beginning of one sequence: at
// least 1.
std::size_t broken_bytes(std::string_view text);

// Byte offset of the first sequence that is not UTF-8 (overlong forms and surrogates included), or npos.
std::size_t find_invalid_utf8(std::string_view text);

}  // namespace dagserve
