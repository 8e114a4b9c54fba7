// Added tokens in text, found by one scan of a byte trie: leftmost start, then longest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tables.h"

namespace dagserve {

// Where an added token stands, the spaces it takes along included; `token` is its index among the tables' added tokens.
struct Found {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t next = 0;  // where to go on looking
  std::uint32_t token = kNoToken;
};

class AddedTrie {
 public:
  AddedTrie() = default;
  explicit AddedTrie(std::string_view section);

  bool empty() const { return nodes_ <= 1; }

  // The next added token that lies within [from, limit) of `text`; `token` is kNoToken where there is none. `taken` is
  // where the one before ended, its spaces included.
  Found find(const Tables& tables, std::string_view text, std::size_t from, std::size_t limit, std::size_t taken) const;

 private:
  std::uint32_t child(std::uint32_t node, unsigned char byte) const;
  std::size_t longest(std::string_view text, std::size_t at, std::size_t limit, std::uint32_t& token) const;

  std::uint32_t nodes_ = 0;
  const std::uint32_t* roots_ = nullptr;
  const std::uint32_t* first_edges_ = nullptr;
  const std::uint32_t* tokens_ = nullptr;
  const std::uint32_t* edge_bytes_ = nullptr;
  const std::uint32_t* children_ = nullptr;
};

}  // namespace dagserve
