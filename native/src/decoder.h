// Tokens to text, as a tokenizer's decoder does it; dagserve/tokenizer/decoding.py is the readable form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tables.h"

namespace dagserve {

class Decoder {
 public:
  // `special`: whether special tokens are shown; `unknown`: whether the token of what has none is.
  struct Shown {
    bool special = false;
    bool unknown = true;
  };

  explicit Decoder(const Tables& tables);

  bool supported() const { return head_.supported != 0; }
  std::size_t vocab_size() const { return flags_.size(); }

  // Bytes that the text of so many tokens has at most; `decode` needs as many of workspace.
  std::size_t most_bytes(std::size_t tokens) const { return 3 * tokens * head_.longest; }

  // Whether the token's text begins inside a character.
  bool begins_inside(std::int64_t id) const {
    const std::string_view text = token(id);
    return !text.empty() && (static_cast<unsigned char>(text[0]) & 0xC0) == 0x80;
  }

  // Writes the text of `ids` to `out`; one that the tokenizer does not know has none, as models may have more rows than
  // their tokenizer has tokens. Returns the bytes written.
  std::size_t decode(std::span<const std::int64_t> ids, Shown shown, std::span<std::byte> workspace, char* out) const;

 private:
  struct Head {
    std::uint32_t supported, byte_level, strip, longest;
  };
  static constexpr unsigned char kSpecial = 1, kByte = 2, kUnknown = 4;

  std::string_view token(std::int64_t id) const {
    const auto i = static_cast<std::size_t>(id);
    return texts_.substr(ends_[i], ends_[i + 1] - ends_[i]);
  }
  bool hidden(std::int64_t id, Shown shown) const {
    if (static_cast<std::size_t>(id) >= flags_.size()) return true;
    const unsigned char flags = flags_[static_cast<std::size_t>(id)];
    return (!shown.special && (flags & kSpecial)) || (!shown.unknown && (flags & kUnknown));
  }

  Head head_;
  const std::uint32_t* ends_;
  std::string_view texts_;
  std::span<const unsigned char> flags_;
};

}  // namespace dagserve
