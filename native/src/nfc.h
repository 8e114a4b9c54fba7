// Unicode's canonical composition, by the tables of dagserve/tokenizer/tables.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tables.h"

namespace dagserve {

class Nfc {
 public:
  Nfc() = default;
  explicit Nfc(std::string_view section);

  // 64-bit words of workspace that `compose` needs for texts of up to `text_bytes`.
  static std::size_t workspace_words(std::size_t text_bytes) { return 2 * text_bytes + 4; }

  // Whether `text`, valid UTF-8, is what composing makes of it.
  bool is_composed(std::string_view text) const;

  // Writes the composed form of `text` to `out`, which holds three times its bytes. Returns the bytes written.
  std::size_t compose(std::string_view text, std::span<std::uint64_t> workspace, char* out) const;

 private:
  struct Record {
    std::uint32_t first, length, combining, flags;
  };
  struct Pair {
    std::uint32_t first, second, composed, zero;
  };
  static constexpr std::uint32_t kJoins = 1, kNeverStays = 2;

  const Record& record(std::uint32_t code_point) const { return records_[numbers_[code_point]]; }
  bool begins_cluster(std::uint32_t code_point) const;
  std::size_t decompose(std::string_view text, std::size_t& at, std::span<std::uint64_t> cluster) const;
  std::uint32_t pair(std::uint32_t first, std::uint32_t second) const;

  TwoLevel<std::uint16_t> numbers_;
  const Record* records_ = nullptr;
  const std::uint32_t* decompositions_ = nullptr;
  const Pair* pairs_ = nullptr;
  std::uint64_t mask_ = 0;
  unsigned shift_ = 0;
};

}  // namespace dagserve
