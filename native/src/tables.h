// A tokenizer's tables, memory-mapped from the file that dagserve/tokenizer.py writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace dagserve {

enum class ScannerKind : std::uint32_t { byte_level = 0, digits_byte_level = 1 };

constexpr std::uint32_t kNoRank = 0xFFFFFFFF;
constexpr std::uint32_t kNoToken = 0xFFFFFFFF;

// What a pair of tokens merges to; `rank` is kNoRank where it does not.
struct Merge {
  std::uint32_t rank = kNoRank;
  std::uint32_t id = kNoToken;
};

// A token found in the template's literal text before byte-pair encoding.
struct AddedToken {
  std::string_view text;
  std::uint32_t id = 0;
  bool normalized = false;  // looked for only where the others leave text
};

class Tables {
 public:
  // Throws std::runtime_error: the file cannot be read, or is damaged or of another version.
  explicit Tables(const std::string& path);
  ~Tables();
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  ScannerKind scanner() const { return scanner_; }
  std::uint32_t vocab_size() const { return vocab_size_; }
  std::uint32_t unknown() const { return unknown_; }  // kNoToken: bytes without a token are dropped
  bool fuse_unknown() const { return fuse_unknown_; }
  std::uint32_t byte_token(unsigned char byte) const { return byte_tokens_[byte]; }
  std::size_t added_count() const { return added_.size(); }
  AddedToken added(std::size_t index) const;

  Merge merge(std::uint32_t left, std::uint32_t right) const {
    const std::uint64_t key = std::uint64_t{left} << 32 | right;
    for (std::uint64_t i = key * 0x9E3779B97F4A7C15u >> shift_;; i = (i + 1) & mask_) {
      const Slot& slot = slots_[i];
      if (slot.left == left && slot.right == right) return {slot.rank, slot.id};
      if (slot.left == kNoToken) return {};
    }
  }

 private:
  struct Slot {
    std::uint32_t left, right, rank, id;
  };
  struct Added {
    std::uint32_t offset, length, id, normalized;
  };

  void read(std::string_view file, const std::string& path);

  void* mapping_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  ScannerKind scanner_ = ScannerKind::byte_level;
  std::uint32_t vocab_size_ = 0;
  std::uint32_t unknown_ = kNoToken;
  bool fuse_unknown_ = false;
  unsigned shift_ = 0;
  std::uint64_t mask_ = 0;
  const std::uint32_t* byte_tokens_ = nullptr;
  const Slot* slots_ = nullptr;
  std::span<const Added> added_;
  std::string_view added_text_;
};

}  // namespace dagserve
