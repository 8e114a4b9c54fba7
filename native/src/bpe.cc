#include "bpe.h"

#include <algorithm>
#include <bit>

#include "unicode.h"

namespace dagserve {
namespace {

// Up to here a linear scan for the lowest rank beats keeping a tree.
constexpr std::size_t kShortPiece = 48;

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

void push_all(const std::uint32_t* ids, std::size_t count, TokenSink& sink) {
  for (std::size_t i = 0; i < count; ++i) sink.push(ids[i]);
}

void encode_short(const Tables& tables, std::string_view piece, TokenSink& sink) {
  std::uint32_t ids[kShortPiece];
  Merge merges[kShortPiece];  // merges[i] joins ids[i] and ids[i + 1]
  std::size_t count = Symbols(tables, ids).read(piece);
  for (std::size_t i = 0; i + 1 < count; ++i) merges[i] = tables.merge(ids[i], ids[i + 1]);
  while (count > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < count; ++i)
      if (merges[i].rank < merges[best].rank) best = i;
    if (merges[best].rank == kNoRank) break;
    ids[best] = merges[best].id;
    --count;
    std::copy(ids + best + 2, ids + count + 1, ids + best + 1);
    if (best + 1 < count) {
      std::copy(merges + best + 2, merges + count, merges + best + 1);
      merges[best] = tables.merge(ids[best], ids[best + 1]);
    }
    if (best > 0) merges[best - 1] = tables.merge(ids[best - 1], ids[best]);
  }
  push_all(ids, count, sink);
}

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
  return piece_bytes <= kShortPiece ? 0 : sizeof(std::uint32_t) * (3 * piece_bytes + 2 * std::bit_ceil(piece_bytes));
}

void encode_piece(const Tables& tables, std::string_view piece, std::span<std::byte> workspace, TokenSink& sink) {
  if (const std::uint32_t whole = tables.piece(piece); whole != kNoToken) return sink.push(whole);
  if (piece.size() <= kShortPiece) return encode_short(tables, piece, sink);
  LongPiece tokens(tables, piece, workspace);
  tokens.merge_all();
  tokens.push(sink);
}

}  // namespace dagserve
