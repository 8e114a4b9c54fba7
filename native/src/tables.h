// A tokenizer's tables, memory-mapped from the file that dagserve/tokenizer/tables.py writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "section_file.h"

namespace dagserve {

constexpr std::uint32_t kNoRank = 0xFFFFFFFF;
constexpr std::uint32_t kNoToken = 0xFFFFFFFF;

// The same values as in dagserve/tokenizer/tables.py.
enum class Section : std::size_t {
  options,
  byte_tokens,
  characters,
  merges,
  pieces,
  long_pieces,
  steps,
  step_texts,
  added,
  raw_trie,
  normalized_trie,
  around,
  spaces,
  words,
  nfc,
  decoding,
  token_ends,
  token_texts,
  token_flags,
  merge_filter,
  neighbor_filter,
  pairs,
  triples,
  partial_joins,
  merged,
  scanners,
};
enum class StepKind : std::uint32_t { nfc, replace, prefix, split };
enum class Behavior : std::uint32_t { isolated, removed, merged_with_previous, merged_with_next, contiguous };

// A value for every code point: block numbers, then the distinct blocks of 128.
template <class Value>
class TwoLevel {
 public:
  static constexpr std::size_t kBlocks = 0x110000 >> 7;

  TwoLevel() = default;
  TwoLevel(const std::uint16_t* numbers, const Value* blocks) : numbers_(numbers), blocks_(blocks) {}
  explicit TwoLevel(const char* data)
      : TwoLevel(reinterpret_cast<const std::uint16_t*>(data),
                 reinterpret_cast<const Value*>(data + kBlocks * sizeof(std::uint16_t))) {}

  Value operator[](std::uint32_t code_point) const {
    return blocks_[std::size_t{numbers_[code_point >> 7]} << 7 | (code_point & 127)];
  }

 private:
  const std::uint16_t* numbers_ = nullptr;
  const Value* blocks_ = nullptr;
};

// A character that merging may start from as one token; `id` is kNoToken where it may not. At the byte level it may not
// stand right after (kAfterAscii) or right before (kBeforeAscii) an ASCII byte that joins_ascii() names.
struct Character {
  static constexpr std::uint32_t kAfterAscii = 1, kBeforeAscii = 2;
  std::uint32_t id = kNoToken;
  std::uint32_t flags = 0;
};

// What is compared of a piece, up to 12 bytes of its text or the hash of a longer one, and its first slot.
struct PiecePlace {
  std::uint64_t low;
  std::uint32_t high, bytes;
  std::uint64_t slot;
};

// A step of normalizing or pre-tokenizing.
struct Step {
  StepKind kind;
  std::uint32_t scanner;
  Behavior behavior;
  std::uint32_t invert;
  std::uint32_t text_offset;
  std::uint32_t text_bytes;
  std::uint32_t unless;  // a prefix is left out where the text begins with it
  std::uint32_t first_only;
};

struct AddedToken {
  std::uint32_t id, lstrip, rstrip, single_word;
};

// The options of the model, and how far text may grow before byte-pair encoding: `ratio` times its bytes, and `extra`.
struct Options {
  std::uint32_t byte_level, fuse_unknown, byte_fallback, ignore_merges, unknown, vocab_size;
  std::uint32_t normalizers, transforms, splits, ratio, extra;
  std::uint32_t ranked_by_id;  // merges in the order of their ranks make tokens in the order of their ids
};

class Tables {
 public:
  // Throws std::runtime_error: the file cannot be read, or is damaged or of another version.
  explicit Tables(const std::string& path);

  const Options& options() const { return *options_; }
  std::span<const Step> normalizers() const { return steps_.first(options_->normalizers); }
  std::span<const Step> transforms() const { return steps_.subspan(options_->normalizers, options_->transforms); }
  std::span<const Step> splits() const { return steps_.last(options_->splits); }
  std::string_view text(const Step& step) const { return step_texts_.substr(step.text_offset, step.text_bytes); }
  std::span<const AddedToken> added() const { return added_; }
  std::span<const std::uint32_t> before() const { return before_; }  // ids around the tokens of a text
  std::span<const std::uint32_t> after() const { return after_; }
  bool is_space(std::uint32_t code_point) const { return spaces_[code_point] != 0; }
  bool is_word(std::uint32_t code_point) const { return words_[code_point] != 0; }
  std::string_view section(Section section, std::size_t after = 0) const {
    return file_.section(static_cast<std::size_t>(section) + after);
  }

  std::uint32_t byte_token(unsigned char byte) const { return byte_tokens_[byte]; }
  Character character(std::uint32_t code_point) const {
    const std::uint32_t entry = characters_[code_point];
    return entry == kNoToken ? Character{} : Character{entry & ((1u << 30) - 1), entry >> 30};
  }
  // Whether a token spans the place before `at`, between two characters of several bytes, without all of both. The
  // coarse table says no to most.
  bool joins_partially(std::string_view text, std::size_t at) const {
    const auto low = [&](std::size_t i) { return static_cast<unsigned char>(text[i]) & 63u; };
    const unsigned coarse = low(at - 1) << 6 | low(at);
    if ((partial_joins_[coarse / 8] >> coarse % 8 & 1) == 0) return false;
    const unsigned fine = coarse << 6 | low(at + 1);
    return (partial_joins_[kCoarseJoins + fine / 8] >> fine % 8 & 1) != 0;
  }
  // Whether a token spans the place before `at`, between ASCII and a character of several bytes, without all of that.
  bool joins_ascii(std::string_view text, std::size_t at) const {
    const auto left = static_cast<unsigned char>(text[at - 1]);
    const auto right = static_cast<unsigned char>(text[at]);
    const unsigned bit = left < 0x80 ? left << 6 | (right & 63u) : (0x80u | right) << 6 | (left & 63u);
    return (partial_joins_[kCoarseJoins + kFineJoins + bit / 8] >> bit % 8 & 1) != 0;
  }
  // Where a whole piece may be found, prefetched. `end` is that of the memory that may be read behind it.
  void locate(std::string_view piece, const char* end, PiecePlace& place) const;
  std::uint32_t piece(std::string_view text, const PiecePlace& place) const;  // the token that it is, or kNoToken

  // Whether a token may span the place between two characters that are not both ASCII. Where none does, each side
  // merges alone.
  bool may_join(std::uint32_t left, std::uint32_t right) const {
    const std::uint64_t spread = (std::uint64_t{left} << 32 | right) * kSpread;
    const std::uint64_t bit = spread >> neighbor_shift_;
    return (neighbors_[bit / 8] >> bit % 8 & 1) != 0;
  }

  // The rank of a merge, kNoRank where there is none. Where ranks are in the order of ids, it is the id that is made.
  // Most pairs do not merge, which a bit of a filter says without going to the table, larger than the near caches.
  std::uint32_t merge(std::uint32_t left, std::uint32_t right) const {
    const std::uint64_t key = std::uint64_t{left} << kIdBits | right;
    const std::uint64_t bit = key * kSpread >> filter_shift_;
    return (filter_[bit / 8] >> bit % 8 & 1) == 0 ? kNoRank : find(merges_, key);
  }
  std::uint32_t merged(std::uint32_t rank) const { return options_->ranked_by_id != 0 ? rank : merged_[rank]; }

  // The token that two characters of several bytes merge to, or kNoToken: the merges of two such characters once more,
  // in a table small enough for a near cache.
  std::uint32_t pair(std::uint32_t left, std::uint32_t right) const {
    return find(pairs_, std::uint64_t{left} << kIdBits | right);
  }

  // The token that the merges make of three characters of several bytes, or kNoToken.
  std::uint32_t triple(std::uint32_t first, std::uint32_t second, std::uint32_t third) const {
    const std::uint64_t key = std::uint64_t{first} << 2 * kIdBits | std::uint64_t{second} << kIdBits | third;
    for (std::uint64_t i = triples_.first(key);; i = triples_.next(i)) {
      const TripleSlot& slot = triples_.slots[i];
      if (slot.first == first && slot.second == second && slot.third == third) return slot.id;
      if (slot.first == kNoToken) return kNoToken;
    }
  }

 private:
  static constexpr std::uint64_t kSpread = 0x9E3779B97F4A7C15u;
  static constexpr unsigned kIdBits = 21;
  static constexpr std::size_t kCoarseJoins = 64 * 8, kFineJoins = 64 * 64 * 8, kAsciiJoins = 2 * 128 * 8;
  static constexpr std::uint64_t kFree = ~std::uint64_t{0};

  struct TripleSlot {
    std::uint32_t first, second, third, id;
  };
  struct PieceSlot {
    std::uint64_t low;
    std::uint32_t high;
    std::uint32_t id_bytes;  // the id above the bytes in 4 bits, all ones for a long piece
  };
  static constexpr std::uint32_t kLong = 15;
  // Open addressing with linear probing; dagserve/tokenizer/hashing.py lays it out.
  template <class Slot>
  struct Hashed {
    const Slot* slots = nullptr;
    std::uint64_t mask = 0;
    unsigned shift = 0;

    std::uint64_t first(std::uint64_t key) const { return key * kSpread >> shift; }
    std::uint64_t next(std::uint64_t i) const { return (i + 1) & mask; }
  };

  // The value of a key of two ids, all ones where it has none.
  static std::uint32_t find(const Hashed<std::uint64_t>& table, std::uint64_t key) {
    for (std::uint64_t i = table.first(key);; i = table.next(i)) {
      const std::uint64_t slot = table.slots[i];
      if (slot >> kIdBits == key) return slot & ((1u << kIdBits) - 1);
      if (slot == kFree) return kNoToken;
    }
  }

  template <class T>
  std::span<const T> array(Section section) const {
    return file_.array<T>(static_cast<std::size_t>(section));
  }
  template <class Slot>
  Hashed<Slot> hashed(Section section) const;
  void read();
  bool is_long_piece(std::size_t offset, std::string_view text) const;

  SectionFile file_;
  const Options* options_ = nullptr;
  std::span<const Step> steps_;
  std::string_view step_texts_;
  std::span<const AddedToken> added_;
  std::span<const std::uint32_t> before_, after_;
  TwoLevel<std::uint8_t> spaces_, words_;
  const std::uint32_t* byte_tokens_ = nullptr;
  std::string_view long_pieces_;
  TwoLevel<std::uint32_t> characters_;
  Hashed<std::uint64_t> merges_;
  const std::uint32_t* merged_ = nullptr;
  const std::uint8_t* filter_ = nullptr;
  unsigned filter_shift_ = 0;
  const std::uint8_t* neighbors_ = nullptr;
  unsigned neighbor_shift_ = 0;
  const std::uint8_t* partial_joins_ = nullptr;
  Hashed<std::uint64_t> pairs_;
  Hashed<TripleSlot> triples_;
  Hashed<PieceSlot> pieces_;
};

}  // namespace dagserve
