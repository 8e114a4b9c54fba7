// Where in a JSON text a byte stands, for messages about text that a parser refuses as a whole.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace dagserve {

// Writes the path of the value around byte `offset`, such as `items[3]`, into `out` (cut at its end, always closed by a
// zero byte). Reads `text` as far as the offset and takes it for JSON as far as it can.
void json_place(std::string_view text, std::size_t offset, std::span<char> out) noexcept;

// The first byte that no JSON text may have: of invalid UTF-8, or a control character inside a string; npos if none.
std::size_t find_bad_text(std::string_view text) noexcept;

}  // namespace dagserve
