// The automaton of a pre-tokenizer's expression; dagserve/tokenizer/pattern.py makes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tables.h"
#include "unicode.h"

namespace dagserve {

class Scanner {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  // Throws std::invalid_argument: the section is cut short.
  explicit Scanner(std::string_view section);

  // Where the match that begins at `begin` of valid UTF-8 ends, or kNone.
  std::size_t match(std::string_view text, std::size_t begin) const {
    std::size_t end = kNone;
    std::size_t at = begin;
    std::uint32_t state = 1;
    while (state != 0 && at < text.size()) {
      const auto first = static_cast<unsigned char>(text[at]);
      std::uint32_t column = ascii_[first & 127];
      std::uint32_t bytes = 1;
      if (first >= 0x80) {
        const Char c = decode_char(text, at);
        column = classes_[c.code_point];
        bytes = c.bytes;
      }
      const std::uint32_t step = transitions_[state * columns_ + column];
      if (step & kMatched) end = at;
      state = step & ~kMatched;
      at += bytes;
    }
    return state != 0 && (transitions_[state * columns_ + columns_ - 1] & kMatched) ? text.size() : end;
  }

 private:
  static constexpr std::uint32_t kMatched = 0x8000;

  std::uint32_t columns_;
  const std::uint16_t* transitions_;
  TwoLevel<std::uint8_t> classes_;
  std::uint8_t ascii_[128];
};

}  // namespace dagserve
