#include "tables.h"

#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace dagserve {
namespace {

constexpr std::uint32_t kVersion = 7;
constexpr std::size_t kShortPiece = 12;  // vocabulary.SHORT
constexpr std::uint64_t kMix[] = {0x9E3779B97F4A7C15u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u};

// Up to eight bytes as a number, the missing ones zero.
std::uint64_t load(const char* text, std::size_t bytes) {
  std::uint64_t word = 0;
  if (bytes >= 8) {
    std::memcpy(&word, text, 8);
  } else if (bytes >= 4) {
    std::uint32_t low = 0;
    std::uint32_t high = 0;
    std::memcpy(&low, text, 4);
    std::memcpy(&high, text + bytes - 4, 4);
    word = low | std::uint64_t{high} << 8 * (bytes - 4);
  } else if (bytes > 0) {
    const auto at = [&](std::size_t i) { return std::uint64_t{static_cast<unsigned char>(text[i])}; };
    word = at(0) | at(bytes / 2) << 8 * (bytes / 2) | at(bytes - 1) << 8 * (bytes - 1);
  }
  return word;
}

std::uint64_t hash_text(std::string_view text) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < text.size(); i += 8) {
    value = (value ^ load(text.data() + i, std::min<std::size_t>(8, text.size() - i))) * kMix[0];
    value ^= value >> 29;
  }
  return value;
}

std::uint64_t piece_key(std::uint64_t low, std::uint64_t high, std::uint64_t bytes) {
  const std::uint64_t mixed = (low * kMix[0]) ^ (high * kMix[1]) ^ (bytes * kMix[2]);
  return mixed ^ mixed >> 32;
}

// Masks for the first eight bytes of a short piece and for the four after them, by its bytes.
struct Masks {
  std::uint64_t low[kShortPiece + 1];
  std::uint32_t high[kShortPiece + 1];
};
constexpr Masks kMasks = [] {
  Masks masks{};
  for (std::size_t bytes = 0; bytes <= kShortPiece; ++bytes) {
    masks.low[bytes] = bytes < 8 ? (std::uint64_t{1} << 8 * bytes) - 1 : ~std::uint64_t{0};
    masks.high[bytes] = bytes <= 8 ? 0 : static_cast<std::uint32_t>((std::uint64_t{1} << 8 * (bytes - 8)) - 1);
  }
  return masks;
}();

}  // namespace

Tables::Tables(const std::string& path) : file_(path, "DAGTOKEN", kVersion, "tokenizer tables") { read(); }

template <class Slot>
Tables::Hashed<Slot> Tables::hashed(Section which) const {
  const std::span<const Slot> slots = array<Slot>(which);
  if (slots.size() < 2 || !std::has_single_bit(slots.size()))
    file_.refuse("are inconsistent: compile the manifest again");
  return {slots.data(), slots.size() - 1, 64 - static_cast<unsigned>(std::countr_zero(slots.size()))};
}

void Tables::read() {
  const auto consistent = [&](bool right) {
    if (!right) file_.refuse("are inconsistent: compile the manifest again");
  };
  const std::string_view options = section(Section::options);
  consistent(options.size() == sizeof(Options));
  options_ = reinterpret_cast<const Options*>(options.data());
  steps_ = array<Step>(Section::steps);
  consistent(steps_.size() == std::size_t{options_->normalizers} + options_->transforms + options_->splits);
  step_texts_ = section(Section::step_texts);
  added_ = array<AddedToken>(Section::added);
  const auto around = array<std::uint32_t>(Section::around);
  consistent(around.size() >= 2 && around[0] + 2 <= around.size() &&
             around[0] + 2 + around[around[0] + 1] == around.size());
  before_ = around.subspan(1, around[0]);
  after_ = around.subspan(around[0] + 2);
  spaces_ = TwoLevel<std::uint8_t>(section(Section::spaces).data());
  words_ = TwoLevel<std::uint8_t>(section(Section::words).data());
  const auto byte_tokens = array<std::uint32_t>(Section::byte_tokens);
  consistent(byte_tokens.size() == 256);
  byte_tokens_ = byte_tokens.data();
  long_pieces_ = section(Section::long_pieces);
  characters_ = TwoLevel<std::uint32_t>(section(Section::characters).data());
  merges_ = hashed<std::uint64_t>(Section::merges);
  merged_ = array<std::uint32_t>(Section::merged).data();
  const auto filter = array<std::uint8_t>(Section::merge_filter);
  consistent(std::has_single_bit(filter.size()));
  filter_ = filter.data();
  filter_shift_ = 61 - static_cast<unsigned>(std::countr_zero(filter.size()));
  const auto neighbors = array<std::uint8_t>(Section::neighbor_filter);
  consistent(std::has_single_bit(neighbors.size()));
  neighbors_ = neighbors.data();
  neighbor_shift_ = 61 - static_cast<unsigned>(std::countr_zero(neighbors.size()));
  pairs_ = hashed<std::uint64_t>(Section::pairs);
  const auto partial_joins = array<std::uint8_t>(Section::partial_joins);
  consistent(partial_joins.size() == kCoarseJoins + kFineJoins + kAsciiJoins);
  partial_joins_ = partial_joins.data();
  triples_ = hashed<TripleSlot>(Section::triples);
  pieces_ = hashed<PieceSlot>(Section::pieces);
}

void Tables::locate(std::string_view piece, const char* end, PiecePlace& place) const {
  place.high = 0;
  place.bytes = kLong;
  if (piece.size() > kShortPiece) {
    place.low = hash_text(piece);
  } else {
    place.bytes = static_cast<std::uint32_t>(piece.size());
    if (end - piece.data() >= std::ptrdiff_t{kShortPiece}) {
      std::memcpy(&place.low, piece.data(), 8);
      std::memcpy(&place.high, piece.data() + 8, 4);
      place.low &= kMasks.low[piece.size()];
      place.high &= kMasks.high[piece.size()];
    } else {
      place.low = load(piece.data(), piece.size());
      if (piece.size() > 8) place.high = static_cast<std::uint32_t>(load(piece.data() + 8, piece.size() - 8));
    }
  }
  place.slot = pieces_.first(piece_key(place.low, place.high, place.bytes));
  __builtin_prefetch(pieces_.slots + place.slot);
}

std::uint32_t Tables::piece(std::string_view text, const PiecePlace& place) const {
  for (std::uint64_t i = place.slot;; i = pieces_.next(i)) {
    const PieceSlot& slot = pieces_.slots[i];
    if (slot.id_bytes == kNoToken) return kNoToken;
    if (slot.low != place.low || (slot.id_bytes & kLong) != place.bytes) continue;
    if (place.bytes != kLong ? slot.high == place.high : is_long_piece(slot.high, text)) return slot.id_bytes >> 4;
  }
}

// Whether it is what stands at `offset` of the long ones, each behind its bytes.
bool Tables::is_long_piece(std::size_t offset, std::string_view text) const {
  std::uint32_t bytes;
  std::memcpy(&bytes, long_pieces_.data() + offset, sizeof(bytes));
  return bytes == text.size() && long_pieces_.substr(offset + sizeof(bytes), bytes) == text;
}

}  // namespace dagserve
