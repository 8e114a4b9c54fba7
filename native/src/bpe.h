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

// Bytes of workspace that a PieceQueue needs for pieces of up to `piece_bytes`.
std::size_t bpe_workspace_bytes(std::size_t piece_bytes);

// Pieces whose tokens are to be appended to a sink. They are looked up some at a time, so that the tables' lines come
// while the next pieces are cut. O(n log n) in a piece's length; `workspace` is 4-byte aligned.
class PieceQueue {
 public:
  PieceQueue(const Tables& tables, std::span<std::byte> workspace, TokenSink& sink)
      : tables_(tables), workspace_(workspace), sink_(sink) {}

  // `end` is that of the memory that may be read behind `piece`, which stays until the next flush.
  void add(std::string_view piece, const char* end);
  void flush();

 private:
  static constexpr std::size_t kMost = 32;
  struct Waiting {
    std::string_view piece;
    PiecePlace place;
    bool probed;
  };

  const Tables& tables_;
  std::span<std::byte> workspace_;
  TokenSink& sink_;
  std::size_t count_ = 0;
  Waiting waiting_[kMost];
};

}  // namespace dagserve
