#include "bpe.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "unicode.h"

namespace dagserve {
namespace {

// Up to so many tokens a linear scan for the lowest rank beats keeping a tree. Pieces up to so many bytes are read on
// the stack, since characters of several bytes are often one token.
constexpr std::size_t kShortTokens = 64;
constexpr std::size_t kShortPiece = 3 * kShortTokens;

// The tokens that merging starts from: of bytes at the byte level, else of characters. Returns how many.
class Symbols {
 public:
  Symbols(const Tables& tables, std::uint32_t* ids) : tables_(tables), ids_(ids) {}

  std::size_t read(std::string_view piece) {
    for (std::size_t at = 0; at < piece.size();) {
      if (is_ascii(piece[at]) && byte_level_) {
        add(tables_.byte_token(static_cast<unsigned char>(piece[at++])));
        continue;
      }
      const Char c = decode_char(piece, at);
      const Character known = tables_.character(c.code_point);
      if (known.id != kNoToken && (!byte_level_ || stands_well(known, piece, at, at + c.bytes))) {
        add(known.id);
      } else if (byte_level_ || tables_.options().byte_fallback != 0) {
        for (std::uint32_t i = 0; i < c.bytes; ++i) add(tables_.byte_token(static_cast<unsigned char>(piece[at + i])));
      } else {
        add(kNoToken);
      }
      at += c.bytes;
    }
    return count_;
  }

 private:
  static bool is_ascii(char byte) { return static_cast<unsigned char>(byte) < 0x80; }
  static bool stands_well(Character known, std::string_view piece, std::size_t begin, std::size_t end) {
    const bool after = begin > 0 && is_ascii(piece[begin - 1]);
    const bool before = end < piece.size() && is_ascii(piece[end]);
    return !((known.flags & Character::kAfterAscii) && after) && !((known.flags & Character::kBeforeAscii) && before);
  }

  // What has no token is unknown, a run of it perhaps as one, or dropped.
  void add(std::uint32_t id) {
    const Options& options = tables_.options();
    const bool unknown = id == kNoToken;
    if (unknown) {
      if (options.unknown == kNoToken || (after_unknown_ && options.fuse_unknown != 0)) return;
      id = options.unknown;
    }
    after_unknown_ = unknown;
    ids_[count_++] = id;
  }

  const Tables& tables_;
  const bool byte_level_ = tables_.options().byte_level != 0;
  std::uint32_t* ids_;
  std::size_t count_ = 0;
  bool after_unknown_ = false;
};

// Up to kShortTokens tokens as a linked list over arrays. A pair's key is its rank above its place, so that one
// reduction without branches finds the lowest rank and, of equal ones, the leftmost.
class ShortPiece {
 public:
  ShortPiece(const Tables& tables, std::uint32_t* ids, std::size_t count) : tables_(tables), ids_(ids), count_(count) {
    for (std::size_t i = 0; i < count_; ++i) {
      next_[i] = static_cast<std::uint8_t>(i + 1);
      previous_[i] = static_cast<std::uint8_t>(i - 1);
      look_up(i);
    }
    for (std::size_t i = count_; i % kStride != 0; ++i) keys_[i] = kNone;
  }

  void merge_all() {
    const std::size_t end = (count_ + kStride - 1) / kStride * kStride;
    for (;;) {
      std::int32_t lowest = kNone;
      for (std::size_t i = 0; i < end; ++i) lowest = std::min(lowest, keys_[i]);
      if (lowest == kNone) return;
      merge(static_cast<std::size_t>(lowest) % kShortTokens);
    }
  }

  void push(TokenSink& sink) const {
    for (std::size_t i = 0; i < count_; i = next_[i]) sink.push(ids_[i]);
  }

 private:
  static constexpr std::size_t kStride = 8;
  static constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();

  void look_up(std::size_t i) {
    keys_[i] = kNone;
    if (next_[i] >= count_) return;
    const Merge merge = tables_.merge(ids_[i], ids_[next_[i]]);
    if (merge.rank == kNoRank) return;
    keys_[i] = static_cast<std::int32_t>(merge.rank * kShortTokens + i);
    made_[i] = merge.id;
  }

  void merge(std::size_t i) {
    const std::size_t gone = next_[i];
    ids_[i] = made_[i];
    next_[i] = next_[gone];
    if (next_[gone] < count_) previous_[next_[gone]] = static_cast<std::uint8_t>(i);
    keys_[gone] = kNone;
    look_up(i);
    if (i > 0) look_up(previous_[i]);
  }

  const Tables& tables_;
  std::uint32_t* ids_;
  std::size_t count_;
  std::int32_t keys_[kShortTokens];
  std::uint32_t made_[kShortTokens];
  std::uint8_t next_[kShortTokens];
  std::uint8_t previous_[kShortTokens];
};

// A winner tree over the ranks of adjacent pairs: the leftmost lowest in O(log n), and so is changing one.
class RankTree {
 public:
  RankTree(std::uint32_t* nodes, std::size_t leaves) : nodes_(nodes), leaves_(leaves) {}

  std::uint32_t& leaf(std::size_t index) { return nodes_[leaves_ + index]; }
  std::uint32_t lowest() const { return nodes_[1]; }

  void build() {
    for (std::size_t i = leaves_ - 1; i > 0; --i) nodes_[i] = std::min(nodes_[2 * i], nodes_[2 * i + 1]);
  }
  void set(std::size_t index, std::uint32_t rank) {
    leaf(index) = rank;
    for (std::size_t i = (leaves_ + index) / 2; i > 0; i /= 2) nodes_[i] = std::min(nodes_[2 * i], nodes_[2 * i + 1]);
  }
  std::size_t leftmost_lowest() const {
    std::size_t i = 1;
    while (i < leaves_) i = 2 * i + (nodes_[2 * i] != nodes_[1]);
    return i - leaves_;
  }

 private:
  std::uint32_t* nodes_;
  std::size_t leaves_;
};

// Tokens as a doubly linked list over arrays, with the tree over their pairs.
class LongPiece {
 public:
  LongPiece(const Tables& tables, std::string_view piece, std::span<std::byte> workspace)
      : tables_(tables),
        ids_(reinterpret_cast<std::uint32_t*>(workspace.data())),
        next_(ids_ + piece.size()),
        previous_(next_ + piece.size()),
        count_(static_cast<std::uint32_t>(Symbols(tables, ids_).read(piece))),
        tree_(previous_ + piece.size(), std::bit_ceil(piece.size())) {
    for (std::uint32_t i = 0; i < count_; ++i) {
      next_[i] = i + 1;
      previous_[i] = i - 1;
      tree_.leaf(i) = rank(i);
    }
    for (std::size_t i = count_; i < std::bit_ceil(piece.size()); ++i) tree_.leaf(i) = kNoRank;
    tree_.build();
  }

  void merge_all() {
    while (tree_.lowest() != kNoRank) merge(static_cast<std::uint32_t>(tree_.leftmost_lowest()));
  }

  void push(TokenSink& sink) const {
    for (std::uint32_t i = 0; i < count_; i = next_[i]) sink.push(ids_[i]);
  }

 private:
  std::uint32_t rank(std::uint32_t i) const {
    return next_[i] < count_ ? tables_.merge(ids_[i], ids_[next_[i]]).rank : kNoRank;
  }

  void merge(std::uint32_t i) {
    const std::uint32_t gone = next_[i];
    ids_[i] = tables_.merge(ids_[i], ids_[gone]).id;
    next_[i] = next_[gone];
    if (next_[i] < count_) previous_[next_[i]] = i;
    tree_.set(gone, kNoRank);
    tree_.set(i, rank(i));
    if (i > 0) tree_.set(previous_[i], rank(previous_[i]));
  }

  const Tables& tables_;
  std::uint32_t* ids_;
  std::uint32_t* next_;
  std::uint32_t* previous_;
  std::uint32_t count_;
  RankTree tree_;
};

}  // namespace

std::size_t bpe_workspace_bytes(std::size_t piece_bytes) {
  return piece_bytes <= kShortTokens ? 0 : sizeof(std::uint32_t) * (3 * piece_bytes + 2 * std::bit_ceil(piece_bytes));
}

void encode_piece(const Tables& tables, std::string_view piece, std::span<std::byte> workspace, TokenSink& sink) {
  if (const std::uint32_t whole = tables.piece(piece); whole != kNoToken) return sink.push(whole);
  if (piece.size() <= kShortPiece) {
    std::uint32_t ids[kShortPiece];
    const std::size_t count = Symbols(tables, ids).read(piece);
    if (count <= kShortTokens) {
      ShortPiece tokens(tables, ids, count);
      tokens.merge_all();
      return tokens.push(sink);
    }
  }
  LongPiece tokens(tables, piece, workspace);
  tokens.merge_all();
  tokens.push(sink);
}

}  // namespace dagserve
