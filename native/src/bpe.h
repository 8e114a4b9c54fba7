// Byte-pair encoding of one piece: merges by rank, leftmost first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tables.h"

namespace dagserve {

// Where tokens go. Counts past its capacity without writing, so that an error can say how many there are.
struct TokenSink {
  std::int64_t* data = nullptr;
  std::int64_t capacity = 0;
  std::int64_t count = 0;

  void push(std::uint32_t id) {
    if (count < capacity) data[count] = id;
    ++count;
  }
};

// Bytes of workspace that encode_piece needs for pieces of up to `piece_bytes`.
std::size_t bpe_workspace_bytes(std::size_t piece_bytes);

// Appends the tokens of `piece` to `sink`. O(n log n) in its length; `workspace` is 4-byte aligned.
void encode_piece(const Tables& tables, std::string_view piece, std::span<std::byte> workspace, TokenSink& sink);

}  // namespace dagserve
