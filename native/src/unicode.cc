#include "unicode.h"

#include <cstring>

namespace dagserve {
namespace {

struct Sequence {
  std::size_t bytes;  // of the whole sequence, 0 where its first byte begins none
  std::size_t right;  // of those that are there and may follow one another
};

Sequence sequence_at(std::string_view text, std::size_t position) {
  const auto first = static_cast<unsigned char>(text[position]);
  if (first < 0x80) return {1, 1};
  if (first < 0xC2 || first > 0xF4) return {0, 1};
  const std::size_t bytes = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  std::size_t right = 1;
  for (; right < bytes && position + right < text.size(); ++right) {
    const auto next = static_cast<unsigned char>(text[position + right]);
    if (next < low || next > high) break;
    low = 0x80;
    high = 0xBF;
  }
  return {bytes, right};
}

}  // namespace

std::size_t broken_bytes(std::string_view text) { return sequence_at(text, 0).right; }

std::size_t find_invalid_utf8(std::string_view text) {
  std::size_t position = 0;
  while (position < text.size()) {
    if (static_cast<unsigned char>(text[position]) < 0x80) {
      // Eight bytes at a time where all are ASCII.
      std::uint64_t word = 0;
      if (text.size() - position >= sizeof(word)) std::memcpy(&word, text.data() + position, sizeof(word));
      const bool ascii = text.size() - position >= sizeof(word) && (word & 0x8080808080808080u) == 0;
      position += ascii ? sizeof(word) : 1;
      continue;
    }
    const Sequence found = sequence_at(text, position);
    if (found.right != found.bytes) return position;
    position += found.bytes;
  }
  return std::string_view::npos;
}

}  // namespace dagserve
