#include "unicode.h"

namespace dagserve {
namespace {

// Bytes of the sequence at `position`, 0 where it is not UTF-8.
std::size_t sequence_bytes(std::string_view text, std::size_t position) {
  const auto first = static_cast<unsigned char>(text[position]);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const std::size_t bytes = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (text.size() - position < bytes) return 0;
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  for (std::size_t i = 1; i < bytes; ++i) {
    const auto next = static_cast<unsigned char>(text[position + i]);
    if (next < low || next > high) return 0;
    low = 0x80;
    high = 0xBF;
  }
  return bytes;
}

}  // namespace

std::size_t find_invalid_utf8(std::string_view text) {
  std::size_t position = 0;
  while (position < text.size()) {
    const std::size_t bytes = sequence_bytes(text, position);
    if (bytes == 0) return position;
    position += bytes;
  }
  return std::string_view::npos;
}

}  // namespace dagserve
