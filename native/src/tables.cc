#include "tables.h"

#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace dagserve {
namespace {

constexpr std::uint32_t kVersion = 6;
constexpr std::size_t kUncheckedBytes = 16;  // magic, version and checksum itself
constexpr std::size_t kShortPiece = 16;      // vocabulary.SHORT
constexpr std::uint64_t kMix[] = {0x9E3779B97F4A7C15u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u};

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t checksum;  // CRC-32 of the file after this field
  std::uint64_t file_bytes;
  std::uint32_t sections;
  std::uint32_t reserved[9];
};
struct Entry {
  std::uint64_t offset, bytes;
};
static_assert(sizeof(Header) == 64 && std::endian::native == std::endian::little);

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
    table[i] = value;
  }
  return table;
}

std::uint32_t crc32(std::string_view bytes) {
  static constexpr auto kTable = crc_table();
  std::uint32_t value = 0xFFFFFFFF;
  for (const char byte : bytes) value = kTable[(value ^ static_cast<unsigned char>(byte)) & 0xFF] ^ value >> 8;
  return ~value;
}

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw std::runtime_error("tokenizer tables " + path + " " + reason);
}

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

std::uint64_t piece_key(std::uint64_t low, std::uint64_t high, std::size_t bytes) {
  const std::uint64_t mixed = (low * kMix[0]) ^ (high * kMix[1]) ^ (bytes * kMix[2]);
  return mixed ^ mixed >> 32;
}

}  // namespace

Tables::Tables(const std::string& path) : path_(path), file_(path) {
  if (file_.size() < sizeof(Header)) refuse(path, "are cut short: compile the manifest again");
  const std::string_view file(reinterpret_cast<const char*>(file_.data()), file_.size());
  const Header& header = *reinterpret_cast<const Header*>(file.data());
  if (std::memcmp(header.magic, "DAGTOKEN", 8) != 0) refuse(path, "are not a tokenizer table file");
  if (header.version != kVersion)
    refuse(path, "have version " + std::to_string(header.version) + ", this runtime reads " + std::to_string(kVersion) +
                     ": compile the manifest again");
  if (header.file_bytes != file.size()) refuse(path, "are cut short: compile the manifest again");
  if (crc32(file.substr(kUncheckedBytes)) != header.checksum) refuse(path, "are damaged: compile the manifest again");
  read();
}

std::string_view Tables::section(Section section, std::size_t after) const {
  const char* file = reinterpret_cast<const char*>(file_.data());
  const Header& header = *reinterpret_cast<const Header*>(file);
  const std::size_t index = static_cast<std::size_t>(section) + after;
  if (index >= header.sections || sizeof(Header) + header.sections * sizeof(Entry) > file_.size())
    refuse(path_, "lack a section: compile the manifest again");
  const Entry& entry = reinterpret_cast<const Entry*>(file + sizeof(Header))[index];
  if (entry.offset > file_.size() || entry.bytes > file_.size() - entry.offset)
    refuse(path_, "are inconsistent: compile the manifest again");
  return {file + entry.offset, entry.bytes};
}

template <class T>
std::span<const T> Tables::array(Section which) const {
  const std::string_view bytes = section(which);
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

template <class Slot>
Tables::Hashed<Slot> Tables::hashed(Section which) const {
  const std::span<const Slot> slots = array<Slot>(which);
  if (slots.size() < 2 || !std::has_single_bit(slots.size()))
    refuse(path_, "are inconsistent: compile the manifest again");
  return {slots.data(), slots.size() - 1, 64 - static_cast<unsigned>(std::countr_zero(slots.size()))};
}

void Tables::read() {
  const auto consistent = [&](bool right) {
    if (!right) refuse(path_, "are inconsistent: compile the manifest again");
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
  merges_ = hashed<MergeSlot>(Section::merges);
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
  consistent(partial_joins.size() == kCoarseJoins + kFineJoins);
  partial_joins_ = partial_joins.data();
  triples_ = hashed<TripleSlot>(Section::triples);
  pieces_ = hashed<PieceSlot>(Section::pieces);
}

std::uint32_t Tables::piece(std::string_view text) const {
  const bool is_short = text.size() <= kShortPiece;
  const std::uint64_t low = is_short ? load(text.data(), text.size()) : hash_text(text);
  const std::uint64_t high = is_short && text.size() > 8 ? load(text.data() + 8, text.size() - 8) : 0;
  for (std::uint64_t i = pieces_.first(piece_key(low, high, text.size()));; i = pieces_.next(i)) {
    const PieceSlot& slot = pieces_.slots[i];
    if (slot.id == kNoToken) return kNoToken;
    const std::uint64_t slot_low = slot.words[0] | std::uint64_t{slot.words[1]} << 32;
    const std::uint64_t slot_high = slot.words[2] | std::uint64_t{slot.words[3]} << 32;
    if (slot.bytes != text.size() || slot_low != low) continue;
    if (is_short ? slot_high == high : long_pieces_.substr(slot_high, text.size()) == text) return slot.id;
  }
}

}  // namespace dagserve
