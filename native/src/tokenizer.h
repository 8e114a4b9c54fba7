// Text to tokens: pre-tokenize into pieces, then byte-pair encode each. Special tokens only from template text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bpe.h"
#include "tables.h"

namespace dagserve {

// The end of the piece that starts at `begin` of `text`, by the byte-level regex
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// `text` is valid UTF-8 and ends where the regex would see its end.
std::size_t byte_level_piece_end(std::string_view text, std::size_t begin);

// A part of literal text: plain text (`token` is kNoToken), or one added token.
struct LiteralPart {
  std::string text;
  std::uint32_t token = kNoToken;
};

class Tokenizer {
 public:
  // Throws std::runtime_error: the tables cannot be read.
  explicit Tokenizer(const std::string& path) : tables_(path) {}

  const Tables& tables() const { return tables_; }

  // Bytes of workspace that `encode` needs for texts of up to `text_bytes`.
  static std::size_t workspace_bytes(std::size_t text_bytes) { return bpe_workspace_bytes(text_bytes); }

  // Appends the tokens of valid UTF-8 `text`, in which no added token is looked for.
  void encode(std::string_view text, std::span<std::byte> workspace, TokenSink& sink) const;

  // Splits literal text at its added tokens, leftmost first, then longest. Allocates: load time only.
  std::vector<LiteralPart> split_literal(std::string_view text) const;

 private:
  void encode_run(std::string_view text, std::span<std::byte> workspace, TokenSink& sink) const;
  void split_by(bool normalized, std::string_view text, std::vector<LiteralPart>& parts) const;

  Tables tables_;
};

}  // namespace dagserve
