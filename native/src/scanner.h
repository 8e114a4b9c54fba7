// The automaton of a pre-tokenizer's expression; dagserve/tokenizer/pattern.py makes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

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
    std::uint32_t row = kStart;
    while (row != 0 && at < text.size()) {
      const auto first = static_cast<unsigned char>(text[at]);
      std::uint32_t step;
      std::uint32_t bytes = 1;
      if (first < 0x80) {
        step = ascii_[row + first];
      } else {
        const Char c = decode_char(text, at);
        step = expanded(transitions_[row / kAscii * columns_ + classes_[c.code_point]]);
        bytes = c.bytes;
      }
      if (step & kMatched) end = at;
      row = step & ~kMatched;
      at += bytes;
    }
    return row != 0 && (transitions_[row / kAscii * columns_ + columns_ - 1] & kMatchedHere) ? text.size() : end;
  }

 private:
  static constexpr std::uint32_t kAscii = 128, kStart = kAscii;  // state 1
  static constexpr std::uint32_t kMatched = 0x80000000;
  static constexpr std::uint16_t kMatchedHere = 0x8000;

  // A transition as the beginning of the next state's row of ASCII, and whether the match may end before it.
  static std::uint32_t expanded(std::uint16_t step) {
    return (step & ~kMatchedHere) * kAscii | (step & kMatchedHere ? kMatched : 0);
  }

  std::uint32_t columns_;
  const std::uint16_t* transitions_;
  TwoLevel<std::uint8_t> classes_;
  std::vector<std::uint32_t> ascii_;  // by state and byte, so that a byte costs one dependent load
};

}  // namespace dagserve
