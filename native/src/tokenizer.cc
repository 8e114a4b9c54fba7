#include "tokenizer.h"

#include "unicode.h"

namespace dagserve {
namespace {

// Bytes of the contraction at `position`, which holds an apostrophe; 0 where there is none.
std::size_t contraction_bytes(std::string_view text, std::size_t position) {
  const auto at = [&](std::size_t i) { return position + i < text.size() ? text[position + i] : '\0'; };
  const char first = at(1);
  const char second = at(2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l')) return 3;
  return 0;
}

std::size_t run_end(std::string_view text, std::size_t position, CharClass wanted) {
  while (position < text.size()) {
    const Char c = decode_char(text, position);
    if (class_of(c.code_point) != wanted) break;
    position += c.bytes;
  }
  return position;
}

// `\s+(?!\S)|\s+`: all of a run of spaces but its last, where text follows and more than one is there.
std::size_t space_end(std::string_view text, std::size_t begin) {
  std::size_t end = begin;
  std::size_t last = begin;
  while (end < text.size()) {
    const Char c = decode_char(text, end);
    if (class_of(c.code_point) != CharClass::space) break;
    last = end;
    end += c.bytes;
  }
  return end == text.size() || last == begin ? end : last;
}

}  // namespace

std::size_t byte_level_piece_end(std::string_view text, std::size_t begin) {
  if (text[begin] == '\'')
    if (const std::size_t bytes = contraction_bytes(text, begin)) return begin + bytes;
  Char c = decode_char(text, begin);
  std::size_t start = begin;
  if (c.code_point == ' ' && begin + 1 < text.size()) {
    start = begin + 1;
    c = decode_char(text, start);
  }
  const CharClass kind = class_of(c.code_point);
  if (kind == CharClass::space) return space_end(text, begin);
  return run_end(text, start + c.bytes, kind);
}

void Tokenizer::encode(std::string_view text, std::span<std::byte> workspace, TokenSink& sink) const {
  if (tables_.scanner() == ScannerKind::byte_level) return encode_run(text, workspace, sink);
  std::size_t run = 0;
  for (std::size_t position = 0; position < text.size();) {
    const Char c = decode_char(text, position);
    const std::size_t end = position + c.bytes;
    if (is_numeric(c.code_point)) {
      encode_run(text.substr(run, position - run), workspace, sink);
      encode_run(text.substr(position, c.bytes), workspace, sink);
      run = end;
    }
    position = end;
  }
  encode_run(text.substr(run), workspace, sink);
}

void Tokenizer::encode_run(std::string_view text, std::span<std::byte> workspace, TokenSink& sink) const {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = byte_level_piece_end(text, begin);
    encode_piece(tables_, text.substr(begin, end - begin), workspace, sink);
    begin = end;
  }
}

std::vector<LiteralPart> Tokenizer::split_literal(std::string_view text) const {
  std::vector<LiteralPart> first;
  split_by(false, text, first);
  std::vector<LiteralPart> parts;
  for (const LiteralPart& part : first) {
    if (part.token == kNoToken)
      split_by(true, part.text, parts);
    else
      parts.push_back(part);
  }
  return parts;
}

void Tokenizer::split_by(bool normalized, std::string_view text, std::vector<LiteralPart>& parts) const {
  std::size_t plain = 0;
  for (std::size_t position = 0; position < text.size();) {
    AddedToken longest;
    for (std::size_t i = 0; i < tables_.added_count(); ++i) {
      const AddedToken token = tables_.added(i);
      if (token.normalized == normalized && token.text.size() > longest.text.size() &&
          text.substr(position).starts_with(token.text))
        longest = token;
    }
    if (longest.text.empty()) {
      ++position;
      continue;
    }
    if (position > plain) parts.push_back({std::string(text.substr(plain, position - plain)), kNoToken});
    parts.push_back({std::string(longest.text), longest.id});
    plain = position += longest.text.size();
  }
  if (text.size() > plain) parts.push_back({std::string(text.substr(plain)), kNoToken});
}

}  // namespace dagserve
