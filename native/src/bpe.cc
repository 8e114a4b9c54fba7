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
constexpr std::size_t kShortWide = 9;  // bytes; three characters of most scripts

// Marks in the ids that Symbols reads: a character of several bytes; any whole character; no token spans the place
// before it.
constexpr std::uint32_t kWide = 0x80000000, kWhole = 0x40000000, kCut = 0x20000000, kId = kCut - 1;

// The tokens that merging starts from: of bytes at the byte level, else of characters. Returns how many.
class Symbols {
 public:
  Symbols(const Tables& tables, std::uint32_t* ids) : tables_(tables), ids_(ids) {}

  std::size_t read(std::string_view piece) {
    for (std::size_t at = 0; at < piece.size();) {
      if (is_ascii(piece[at]) && byte_level_) {
        add(tables_.byte_token(static_cast<unsigned char>(piece[at++])), kWhole);
        continue;
      }
      const Char c = decode_char(piece, at);
      const Character known = tables_.character(c.code_point);
      if (known.id != kNoToken && (!byte_level_ || stands_well(known, piece, at, at + c.bytes))) {
        add(known.id, c.bytes > 1 ? kWide | kWhole : kWhole);
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
  bool stands_well(Character known, std::string_view piece, std::size_t begin, std::size_t end) const {
    if (begin > 0) {
      if (is_ascii(piece[begin - 1]) ? (known.flags & Character::kAfterAscii) && tables_.joins_ascii(piece, begin)
                                     : tables_.joins_partially(piece, begin))
        return false;
    }
    if (end == piece.size()) return true;
    return is_ascii(piece[end]) ? !(known.flags & Character::kBeforeAscii) || !tables_.joins_ascii(piece, end)
                                : !tables_.joins_partially(piece, end);
  }

  // What has no token is unknown, a run of it perhaps as one, or dropped.
  void add(std::uint32_t id, std::uint32_t marks = 0) {
    const Options& options = tables_.options();
    const bool unknown = id == kNoToken;
    if (unknown) {
      if (options.unknown == kNoToken || (after_unknown_ && options.fuse_unknown != 0)) return;
      id = options.unknown;
      marks = 0;
    }
    after_unknown_ = unknown;
    ids_[count_++] = id | marks;
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
  // `wide`: all are characters of several bytes, and ranks are in the order of ids.
  ShortPiece(const Tables& tables, std::uint32_t* ids, std::size_t count, bool wide)
      : tables_(tables), ids_(ids), count_(count) {
    for (std::size_t i = 0; i < count_; ++i) {
      next_[i] = static_cast<std::uint8_t>(i + 1);
      previous_[i] = static_cast<std::uint8_t>(i - 1);
      if (wide)
        look_up_pair(i);
      else
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
    const std::uint32_t rank = tables_.merge(ids_[i], ids_[next_[i]]);
    if (rank != kNoRank) keys_[i] = static_cast<std::int32_t>(rank * kShortTokens + i);
  }

  void look_up_pair(std::size_t i) {
    const std::uint32_t made = i + 1 < count_ ? tables_.pair(ids_[i], ids_[i + 1]) : kNoToken;
    keys_[i] = made == kNoToken ? kNone : static_cast<std::int32_t>(made * kShortTokens + i);
  }

  void merge(std::size_t i) {
    const std::size_t gone = next_[i];
    ids_[i] = tables_.merged(static_cast<std::uint32_t>(keys_[i]) / kShortTokens);
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
  // `words` has room for 2 * count + 2 * bit_ceil(count).
  LongPiece(const Tables& tables, std::uint32_t* ids, std::size_t count, std::uint32_t* words)
      : tables_(tables),
        ids_(ids),
        next_(words),
        previous_(words + count),
        count_(static_cast<std::uint32_t>(count)),
        tree_(words + 2 * count, std::bit_ceil(count)) {
    for (std::uint32_t i = 0; i < count_; ++i) {
      next_[i] = i + 1;
      previous_[i] = i - 1;
      tree_.leaf(i) = rank(i);
    }
    for (std::size_t i = count_; i < std::bit_ceil(count); ++i) tree_.leaf(i) = kNoRank;
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
    return next_[i] < count_ ? tables_.merge(ids_[i], ids_[next_[i]]) : kNoRank;
  }

  void merge(std::uint32_t i) {
    const std::uint32_t gone = next_[i];
    ids_[i] = tables_.merged(tree_.lowest());
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

// Two characters of several bytes.
void encode_pair(const Tables& tables, const std::uint32_t* ids, TokenSink& sink) {
  const std::uint32_t made = tables.pair(ids[0], ids[1]);
  if (made != kNoToken) return sink.push(made);
  sink.push(ids[0]);
  sink.push(ids[1]);
}

// Three of them, where ranks are in the order of ids. Unless they are one token, what merges first merges alone.
void encode_triple(const Tables& tables, const std::uint32_t* ids, TokenSink& sink) {
  const std::uint32_t whole = tables.triple(ids[0], ids[1], ids[2]);
  if (whole != kNoToken) return sink.push(whole);
  const std::uint32_t left = tables.pair(ids[0], ids[1]);
  const std::uint32_t right = tables.pair(ids[1], ids[2]);  // kNoToken is above all ids
  if (left <= right && left != kNoToken) {
    sink.push(left);
    return sink.push(ids[2]);
  }
  sink.push(ids[0]);
  if (right != kNoToken) return sink.push(right);
  sink.push(ids[1]);
  sink.push(ids[2]);
}

// Tokens that nothing joins to what stands beside them. `words` is only used where there are more than kShortTokens.
void encode_alone(const Tables& tables, std::uint32_t* ids, std::size_t count, std::uint32_t* words, TokenSink& sink) {
  std::uint32_t wide = kWide;
  for (std::size_t i = 0; i < count; ++i) {
    wide &= ids[i];
    ids[i] &= kId;
  }
  if (count == 1) return sink.push(ids[0]);
  if (count == 2 && wide) return encode_pair(tables, ids, sink);
  if (count == 3 && wide && tables.options().ranked_by_id) return encode_triple(tables, ids, sink);
  if (count <= kShortTokens) {
    ShortPiece tokens(tables, ids, count, wide != 0 && tables.options().ranked_by_id != 0);
    tokens.merge_all();
    return tokens.push(sink);
  }
  LongPiece tokens(tables, ids, count, words);
  tokens.merge_all();
  tokens.push(sink);
}

// Cuts a piece where no token spans two characters, not both ASCII; what lies between merges alone.
void encode_symbols(const Tables& tables, std::uint32_t* ids, std::size_t count, std::uint32_t* words,
                    TokenSink& sink) {
  for (std::size_t i = 1; i < count; ++i)
    if ((ids[i - 1] & ids[i] & kWhole) && ((ids[i - 1] | ids[i]) & kWide) &&
        !tables.may_join(ids[i - 1] & kId, ids[i] & kId))
      ids[i] |= kCut;
  for (std::size_t begin = 0, end = 1; begin < count; begin = end++) {
    while (end < count && !(ids[end] & kCut)) ++end;
    encode_alone(tables, ids + begin, end - begin, words, sink);
  }
}

// A piece that is not one token.
void encode_parts(const Tables& tables, std::string_view piece, std::span<std::byte> workspace, TokenSink& sink) {
  if (piece.size() <= kShortPiece) {
    std::uint32_t ids[kShortPiece];
    const std::size_t count = Symbols(tables, ids).read(piece);
    if (count <= kShortTokens) return encode_symbols(tables, ids, count, nullptr, sink);
  }
  auto* const ids = reinterpret_cast<std::uint32_t*>(workspace.data());
  const std::size_t count = Symbols(tables, ids).read(piece);
  encode_symbols(tables, ids, count, ids + piece.size(), sink);
}

}  // namespace

std::size_t bpe_workspace_bytes(std::size_t piece_bytes) {
  return piece_bytes <= kShortTokens ? 0 : sizeof(std::uint32_t) * (3 * piece_bytes + 2 * std::bit_ceil(piece_bytes));
}

void PieceQueue::add(std::string_view piece, const char* end) {
  if (count_ == kMost) flush();
  Waiting& added = waiting_[count_++];
  added.piece = piece;
  // Text of wide characters is cut first: of its long pieces few are one token.
  added.probed =
      piece.size() <= kShortWide || static_cast<unsigned char>(piece[0]) < 0xC2 || tables_.options().ignore_merges != 0;
  if (added.probed) tables_.locate(piece, end, added.place);
}

void PieceQueue::flush() {
  for (const Waiting& next : std::span(waiting_, count_)) {
    const std::uint32_t whole = next.probed ? tables_.piece(next.piece, next.place) : kNoToken;
    if (whole != kNoToken)
      sink_.push(whole);
    else
      encode_parts(tables_, next.piece, workspace_, sink_);
  }
  count_ = 0;
}

}  // namespace dagserve
