#include "nfc.h"

#include <algorithm>
#include <bit>

#include "unicode.h"

namespace dagserve {
namespace {

constexpr std::uint32_t kLeads = 0x1100, kVowels = 0x1161, kTrails = 0x11A7, kSyllables = 0xAC00;
constexpr std::uint32_t kLeadCount = 19, kVowelCount = 21, kTrailCount = 28;

// Hangul syllables are composed by arithmetic (The Unicode Standard, 3.12). Returns 0 where the two do not compose.
std::uint32_t hangul(std::uint32_t first, std::uint32_t second) {
  const std::uint32_t lead = first - kLeads;
  const std::uint32_t vowel = second - kVowels;
  if (lead < kLeadCount && vowel < kVowelCount) return kSyllables + (lead * kVowelCount + vowel) * kTrailCount;
  const std::uint32_t syllable = first - kSyllables;
  const std::uint32_t trail = second - kTrails;
  const bool open = syllable < kLeadCount * kVowelCount * kTrailCount && syllable % kTrailCount == 0;
  return open && trail > 0 && trail < kTrailCount ? first + trail : 0;
}

// A decomposed character: its combining class above its place above the character, so that sorting keeps the order.
constexpr int kClassShift = 56, kPlaceShift = 21;
constexpr std::uint64_t kCodePoint = (1u << kPlaceShift) - 1;

}  // namespace

Nfc::Nfc(std::string_view section) {
  struct Counts {
    std::uint32_t records, decompositions, slots, blocks;
  };
  const char* at = section.data();
  const Counts& counts = *reinterpret_cast<const Counts*>(at);
  at += sizeof(Counts);
  numbers_ = TwoLevel<std::uint16_t>(at);
  at += (TwoLevel<std::uint16_t>::kBlocks + std::size_t{counts.blocks} * 128) * sizeof(std::uint16_t);
  records_ = reinterpret_cast<const Record*>(at);
  at += counts.records * sizeof(Record);
  decompositions_ = reinterpret_cast<const std::uint32_t*>(at);
  at += counts.decompositions * sizeof(std::uint32_t);
  pairs_ = reinterpret_cast<const Pair*>(at);
  mask_ = counts.slots - 1;
  shift_ = 64 - static_cast<unsigned>(std::countr_zero(counts.slots));
}

bool Nfc::is_composed(std::string_view text) const {
  for (std::size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0xCC) {  // below U+0300 all stay and join nothing
      ++at;
      continue;
    }
    const Char c = decode_char(text, at);
    const Record& known = record(c.code_point);
    if (known.combining != 0 || known.flags != 0) return false;
    at += c.bytes;
  }
  return true;
}

bool Nfc::begins_cluster(std::uint32_t code_point) const {
  const Record& known = record(code_point);
  const Record& first = known.length > 0 ? record(decompositions_[known.first]) : known;
  return first.combining == 0 && (first.flags & kJoins) == 0;
}

// Reads one cluster, the characters that may become one, decomposed. Returns how many characters it is.
std::size_t Nfc::decompose(std::string_view text, std::size_t& at, std::span<std::uint64_t> cluster) const {
  std::size_t count = 0;
  const auto add = [&](std::uint32_t code_point) {
    const std::uint64_t combining = record(code_point).combining;
    cluster[count] = combining << kClassShift | std::uint64_t{count} << kPlaceShift | code_point;
    ++count;
  };
  while (at < text.size()) {
    const Char c = decode_char(text, at);
    if (count > 0 && begins_cluster(c.code_point)) break;
    const Record& known = record(c.code_point);
    for (std::uint32_t i = 0; i < known.length; ++i) add(decompositions_[known.first + i]);
    if (known.length == 0) add(c.code_point);
    at += c.bytes;
  }
  return count;
}

std::size_t Nfc::compose(std::string_view text, std::span<std::uint64_t> cluster, char* out) const {
  const auto combining = [&](std::size_t i) { return cluster[i] >> kClassShift; };
  char* end = out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t count = decompose(text, at, cluster);
    for (std::size_t i = 0; i < count;) {
      std::size_t run = i + 1;
      while (combining(i) != 0 && run < count && combining(run) != 0) ++run;
      std::sort(cluster.begin() + static_cast<std::ptrdiff_t>(i), cluster.begin() + static_cast<std::ptrdiff_t>(run));
      i = run;
    }
    std::size_t kept = 1;
    std::size_t starter = combining(0) == 0 ? 0 : count;
    std::uint64_t last = 0;
    for (std::size_t i = 1; i < count; ++i) {
      const std::uint64_t own = combining(i);
      const bool reaches = starter < count && (starter + 1 == kept || (last < own && last != 0));
      const auto second = static_cast<std::uint32_t>(cluster[i] & kCodePoint);
      const std::uint32_t joined =
          reaches ? pair(static_cast<std::uint32_t>(cluster[starter] & kCodePoint), second) : 0;
      if (joined != 0) {
        cluster[starter] = joined;
        continue;
      }
      if (own == 0) starter = kept;
      last = own;
      cluster[kept++] = cluster[i];
    }
    for (std::size_t i = 0; i < kept; ++i) end = encode_char(static_cast<std::uint32_t>(cluster[i] & kCodePoint), end);
  }
  return static_cast<std::size_t>(end - out);
}

std::uint32_t Nfc::pair(std::uint32_t first, std::uint32_t second) const {
  if (const std::uint32_t syllable = hangul(first, second)) return syllable;
  const std::uint64_t key = std::uint64_t{first} << 32 | second;
  for (std::uint64_t i = key * 0x9E3779B97F4A7C15u >> shift_;; i = (i + 1) & mask_) {
    const Pair& slot = pairs_[i];
    if (slot.first == first && slot.second == second) return slot.composed;
    if (slot.first == kNoToken) return 0;
  }
}

}  // namespace dagserve
