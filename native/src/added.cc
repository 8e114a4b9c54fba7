#include "added.h"

#include <algorithm>

#include "unicode.h"

namespace dagserve {
namespace {

// The start of the spaces that end at `end`.
std::size_t spaces_before(const Tables& tables, std::string_view text, std::size_t end) {
  while (end > 0) {
    const std::size_t begin = previous_char(text, end);
    if (!tables.is_space(decode_char(text, begin).code_point)) break;
    end = begin;
  }
  return end;
}

std::size_t spaces_after(const Tables& tables, std::string_view text, std::size_t begin) {
  while (begin < text.size()) {
    const Char c = decode_char(text, begin);
    if (!tables.is_space(c.code_point)) break;
    begin += c.bytes;
  }
  return begin;
}

bool stands_alone(const Tables& tables, std::string_view text, std::size_t begin, std::size_t end) {
  const auto is_word = [&](std::size_t at) { return tables.is_word(decode_char(text, at).code_point); };
  return (begin == 0 || !is_word(previous_char(text, begin))) && (end == text.size() || !is_word(end));
}

}  // namespace

AddedTrie::AddedTrie(std::string_view section) {
  const auto* at = reinterpret_cast<const std::uint32_t*>(section.data());
  nodes_ = at[0];
  const std::uint32_t edges = at[1];
  roots_ = at + 2;
  first_edges_ = roots_ + 256;
  tokens_ = first_edges_ + nodes_ + 1;
  edge_bytes_ = tokens_ + nodes_;
  children_ = edge_bytes_ + edges;
}

std::uint32_t AddedTrie::child(std::uint32_t node, unsigned char byte) const {
  const std::uint32_t* const begin = edge_bytes_ + first_edges_[node];
  const std::uint32_t* const end = edge_bytes_ + first_edges_[node + 1];
  const std::uint32_t* const found = std::lower_bound(begin, end, std::uint32_t{byte});
  return found != end && *found == byte ? children_[found - edge_bytes_] : kNoToken;
}

std::size_t AddedTrie::longest(std::string_view text, std::size_t at, std::size_t limit, std::uint32_t& token) const {
  std::size_t end = at;
  std::uint32_t node = roots_[static_cast<unsigned char>(text[at])];
  for (std::size_t i = at + 1; node != kNoToken; ++i) {
    if (tokens_[node] != kNoToken) {
      token = tokens_[node];
      end = i;
    }
    if (i == limit) break;
    node = child(node, static_cast<unsigned char>(text[i]));
  }
  return end;
}

Found AddedTrie::find(const Tables& tables, std::string_view text, std::size_t from, std::size_t limit,
                      std::size_t taken) const {
  for (std::size_t at = from; at < limit; ++at) {
    if (roots_[static_cast<unsigned char>(text[at])] == kNoToken) continue;
    Found found{at, at, at, kNoToken};
    found.end = found.next = longest(text, at, limit, found.token);
    if (found.token == kNoToken) continue;
    const AddedToken& token = tables.added()[found.token];
    if (token.single_word != 0 && !stands_alone(tables, text, found.begin, found.end)) {
      at = found.end - 1;
      continue;
    }
    if (token.lstrip != 0) found.begin = std::max(taken, spaces_before(tables, text, found.begin));
    if (token.rstrip != 0) found.end = spaces_after(tables, text, found.end);
    return found;
  }
  return {};
}

}  // namespace dagserve
