// Text to tokens: added tokens, normalizing, pre-tokenizing into pieces, byte-pair encoding of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "added.h"
#include "bpe.h"
#include "nfc.h"
#include "scanner.h"
#include "tables.h"

namespace dagserve {

// A part of a text in which added tokens are looked for; elsewhere text never becomes one.
struct Open {
  std::size_t begin, end;
};

class Tokenizer {
 public:
  // Throws std::runtime_error: the tables cannot be read.
  explicit Tokenizer(const std::string& path);

  const Tables& tables() const { return tables_; }

  // Bytes of workspace, 64-byte aligned, that `encode` needs for texts of up to `text_bytes`.
  std::size_t workspace_bytes(std::size_t text_bytes) const;

  // Appends the tokens of valid UTF-8 `text`, those of the post-processor left out. The parts of `open` are in order.
  void encode(std::string_view text, std::span<const Open> open, std::span<std::byte> workspace, TokenSink& sink) const;

  // Whether normalized added tokens can be looked for in just a part of a text: not where normalizing moves its places.
  bool opens_in_part() const { return tables_.normalizers().empty() || normalized_.empty(); }

 private:
  struct Workspace;
  struct Run;

  std::string_view apply(std::span<const Step> steps, std::string_view text, bool at_start, std::size_t buffer,
                         Workspace& space) const;
  std::string_view replace(const Step& step, std::string_view text, char* out) const;
  void encode_raw(std::string_view text, Run& run) const;
  void encode_normalized(std::string_view text, std::size_t offset, Run& run) const;
  void encode_plain(std::string_view text, bool at_start, Run& run) const;
  void encode_split(std::string_view text, std::size_t level, const char* end, Run& run) const;

  Tables tables_;
  AddedTrie raw_, normalized_;
  Nfc nfc_;
  bool composes_ = false;
  std::vector<Scanner> scanners_;
};

}  // namespace dagserve
