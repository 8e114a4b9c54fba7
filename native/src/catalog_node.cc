// A catalog of valid items, for one request: dagserve/catalog.py describes the tables.
#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <optional>

#include "cpu_nodes.h"
#include "section_file.h"

namespace dagserve {
namespace {

constexpr std::uint32_t kVersion = 2;
constexpr std::uint8_t kEnds = 1, kOpen = 2;
constexpr std::size_t kFewOf = 640;  // up to a node in so many is marked by itself, more in one pass over all
enum class Section : std::size_t {
  sizes,
  first,
  label,
  alphabets,
  alphabet_ends,
  widest,
  marks,
  item_nodes,
  item_offsets,
  items,
  item_order,
  attributes,
  attribute_ends,
  value_offsets,
  values,
  set_ends,
  sets,
};
// The ports of nodes/catalog.py, in its order.
enum Output : std::size_t {
  kFirst,
  kLabel,
  kMarks,
  kAlphabets,
  kAlphabetEnds,
  kChildren,
  kChildrenEnds,
  kItemNodes,
  kItemOffsets,
  kItems,
  kPermitted,
  kOutputs,
};

// What a request may have: two bits a node and a bit an item.
class Selection {
 public:
  Selection(std::uint8_t* marks, std::uint8_t* permitted) : marks_(marks), permitted_(permitted) {}

  std::uint8_t marks(std::size_t node) const { return marks_[node / 4] >> node % 4 * 2 & 3; }
  void mark(std::size_t node, std::uint8_t bits) {
    marks_[node / 4] |= static_cast<std::uint8_t>(bits << node % 4 * 2);
  }
  void unmark(std::size_t node, std::uint8_t bits) {
    marks_[node / 4] &= static_cast<std::uint8_t>(~(bits << node % 4 * 2));
  }
  bool permits(std::size_t item) const { return (permitted_[item / 8] >> item % 8 & 1) != 0; }
  void permit(std::size_t item) { permitted_[item / 8] |= static_cast<std::uint8_t>(1 << item % 8); }
  void forbid(std::size_t item) { permitted_[item / 8] &= static_cast<std::uint8_t>(~(1 << item % 8)); }

 private:
  std::uint8_t* marks_;
  std::uint8_t* permitted_;
};

// Bit i of a selection's bits, as words or bytes: little-endian, so that both are the same.
constexpr std::size_t kWordBits = 32;

// A declared attribute, and the range of its values.
struct Attribute {
  enum class Kind : std::uint8_t { text, number, boolean };

  std::string name;
  Kind kind = Kind::text;
  std::size_t begin = 0, end = 0;
};

// The bytes that a value is stored as, Attribute.key_of_text of dagserve/attributes.py.
class Key {
 public:
  // Of a term's value; empty where it is not of the kind.
  static std::optional<Key> of(Attribute::Kind kind, std::string_view text) {
    Key key;
    key.text_ = text;
    if (kind == Attribute::Kind::boolean && text != "true" && text != "false") return std::nullopt;
    if (kind != Attribute::Kind::number) return key;
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(number)) return std::nullopt;
    number += 0.0;  // -0.0 is 0.0
    std::memcpy(key.number_.data(), &number, sizeof(number));
    key.is_number_ = true;
    return key;
  }

  std::string_view bytes() const { return is_number_ ? std::string_view(number_.data(), number_.size()) : text_; }

 private:
  std::string_view text_;
  std::array<char, sizeof(double)> number_{};
  bool is_number_ = false;
};

class CatalogNode final : public CpuNode {
 public:
  explicit CatalogNode(const Config& config)
      : file_(path_of(config), "DAGITEMS", kVersion, "catalog tables"),
        max_nodes_(static_cast<std::size_t>(config.output_bounds.at(kLabel).bound[0])),
        max_items_(static_cast<std::size_t>(config.output_bounds.at(kItemNodes).bound[0])) {
    const auto depth = static_cast<std::size_t>(config.at<std::int64_t>("max_depth"));
    allow_ = port(config, "allow");
    deny_ = port(config, "deny");
    allow_where_ = port(config, "allow_where");
    deny_where_ = port(config, "deny_where");
    if (config.outputs.size() != kOutputs) throw std::invalid_argument("catalog: another number of outputs");
    read();
    read_attributes(config.get<std::vector<std::string>>("attributes", {}));
    extend(depth, config.at<std::int64_t>("max_children"));
  }

  std::size_t workspace_bytes() const override { return mark_bytes() + 2 * item_bytes(); }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte> workspace,
           Status& status) const noexcept override {
    const Lists lists = {given(inputs, allow_), given(inputs, deny_), given(inputs, allow_where_),
                         given(inputs, deny_where_)};
    auto* marks = const_cast<std::uint8_t*>(marks_.data());
    auto* permitted = const_cast<std::uint64_t*>(all_.data());
    if (lists.any()) {
      marks = reinterpret_cast<std::uint8_t*>(workspace.data());
      permitted = reinterpret_cast<std::uint64_t*>(workspace.data() + mark_bytes());
      Selection selection(marks, reinterpret_cast<std::uint8_t*>(permitted));
      if (!select(lists, selection, permitted, permitted + item_bytes() / sizeof(*permitted), status)) return;
      mark(marks, permitted, selection);
    }
    lend(first_, outputs[kFirst]);
    lend(label_, outputs[kLabel]);
    lend(std::span<const std::uint8_t>(marks, marks_.size()), outputs[kMarks]);
    lend(std::span<const std::int32_t>(alphabets_), outputs[kAlphabets]);
    lend(std::span<const std::int32_t>(alphabet_ends_), outputs[kAlphabetEnds]);
    lend(std::span<const std::int32_t>(children_), outputs[kChildren]);
    lend(std::span<const std::int32_t>(children_ends_), outputs[kChildrenEnds]);
    lend(item_nodes_, outputs[kItemNodes]);
    lend(item_offsets_, outputs[kItemOffsets]);
    lend(items_, outputs[kItems]);
    lend(std::span<const std::uint8_t>(reinterpret_cast<std::uint8_t*>(permitted), (item_nodes_.size() + 7) / 8),
         outputs[kPermitted]);
  }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  // What a request may and may not have; null where it does not say.
  struct Lists {
    const Tensor *allow, *deny, *allow_where, *deny_where;
    bool any() const { return allow || deny || allow_where || deny_where; }
  };

  // Relative to the artifact, unless another catalog was put in the place of the artifact's.
  static std::string path_of(const Config& config) {
    const auto& path = config.at<std::string>("tables");
    return path.starts_with("/") ? path : config.root + "/" + path;
  }

  static std::size_t padded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  std::size_t mark_bytes() const { return padded((max_nodes_ + 3) / 4); }
  std::size_t item_bytes() const { return padded((max_items_ + 7) / 8); }

  static std::ptrdiff_t port(const Config& config, std::string_view name) {
    const auto found = std::ranges::find(config.inputs, name);
    return found == config.inputs.end() ? -1 : found - config.inputs.begin();
  }

  static const Tensor* given(std::span<const Tensor> inputs, std::ptrdiff_t index) {
    return index >= 0 && inputs[static_cast<std::size_t>(index)].present ? &inputs[static_cast<std::size_t>(index)]
                                                                         : nullptr;
  }

  template <class T>
  static void lend(std::span<const T> values, Tensor& output) {
    output.data = const_cast<T*>(values.data());
    output.shape[0] = std::ssize(values);
  }

  template <class T>
  std::span<const T> array(Section section) const {
    return file_.array<T>(static_cast<std::size_t>(section));
  }

  void consistent(bool right) const {
    if (!right) file_.refuse("are inconsistent: compile the manifest again");
  }

  // Everything that run() and the packages index with is checked here, once.
  void read() {
    const auto sizes = array<std::uint32_t>(Section::sizes);
    consistent(sizes.size() == 4 && sizes[0] >= 1 && sizes[1] >= 2 && sizes[3] >= 1);
    levels_ = sizes[0];
    const std::size_t nodes = sizes[1], above = sizes[2], items = sizes[3];
    if (items > max_items_ || nodes > max_nodes_)
      file_.refuse("have " + std::to_string(items) + " items, over max_items, " + std::to_string(max_items_));
    first_ = array<std::int32_t>(Section::first);
    label_ = array<std::int32_t>(Section::label);
    marks_ = array<std::uint8_t>(Section::marks);
    widest_ = array<std::int32_t>(Section::widest);
    item_nodes_ = array<std::int32_t>(Section::item_nodes);
    item_offsets_ = array<std::int32_t>(Section::item_offsets);
    items_ = array<std::uint8_t>(Section::items);
    item_order_ = array<std::uint32_t>(Section::item_order);
    const auto alphabets = array<std::int32_t>(Section::alphabets);
    const auto alphabet_ends = array<std::int32_t>(Section::alphabet_ends);
    consistent(first_.size() == above + 1 && label_.size() == nodes && marks_.size() == (nodes + 3) / 4 &&
               widest_.size() == levels_ && alphabet_ends.size() == levels_ + 1 && item_nodes_.size() == items &&
               item_offsets_.size() == items + 1 && item_order_.size() == items);
    consistent(first_[0] == 1 && static_cast<std::size_t>(first_.back()) == nodes && std::ranges::is_sorted(first_));
    consistent(alphabet_ends[0] == 0 && static_cast<std::size_t>(alphabet_ends.back()) == alphabets.size() &&
               std::ranges::adjacent_find(alphabet_ends, std::ranges::greater_equal{}) == alphabet_ends.end());
    consistent(std::ranges::all_of(widest_, [](std::int32_t count) { return count >= 1; }));
    consistent(std::ranges::is_sorted(item_nodes_) && item_nodes_[0] >= 1 &&
               static_cast<std::size_t>(item_nodes_.back()) < nodes);
    consistent(item_offsets_[0] == 0 && std::ranges::is_sorted(item_offsets_) &&
               static_cast<std::size_t>(item_offsets_.back()) == items_.size());
    consistent(std::ranges::all_of(item_order_, [&](std::uint32_t item) { return item < items; }));
    alphabets_.assign(alphabets.begin(), alphabets.end());
    alphabet_ends_.assign(alphabet_ends.begin(), alphabet_ends.end());
    check_labels();
    all_.assign((items + 63) / 64, ~std::uint64_t{0});
    if (items % 64) all_.back() = (std::uint64_t{1} << items % 64) - 1;
  }

  // The sets of items by value. They index the selection's bits, so that every one is checked.
  void read_attributes(const std::vector<std::string>& declared) {
    const auto ends = array<std::int32_t>(Section::attribute_ends);
    std::string lines;
    for (const std::string& text : declared) {
      lines += (lines.empty() ? "" : "\n") + text;
      const std::size_t colon = text.find(':');
      const std::string kind = text.substr(std::min(colon, text.size() - 1) + 1);
      attributes_.push_back({text.substr(0, colon), kind == "number" ? Attribute::Kind::number
                                                    : kind == "bool" ? Attribute::Kind::boolean
                                                                     : Attribute::Kind::text});
      known_ += (known_.empty() ? "" : ", ") + attributes_.back().name + " (" + kind + ")";
    }
    if (known_.empty()) known_ = "none";
    if (file_.section(static_cast<std::size_t>(Section::attributes)) != lines)
      file_.refuse("have other attributes than the graph declares, " + known_);
    value_offsets_ = array<std::int32_t>(Section::value_offsets);
    values_ = file_.section(static_cast<std::size_t>(Section::values));
    set_ends_ = array<std::int32_t>(Section::set_ends);
    sets_ = array<std::uint32_t>(Section::sets);
    const std::size_t values = value_offsets_.size() - 1;
    consistent(ends.size() == attributes_.size() + 1 && ends[0] == 0 && std::ranges::is_sorted(ends) &&
               !value_offsets_.empty() && static_cast<std::size_t>(ends.back()) == values);
    consistent(value_offsets_[0] == 0 && std::ranges::is_sorted(value_offsets_) &&
               static_cast<std::size_t>(value_offsets_.back()) == values_.size());
    consistent(set_ends_.size() == values + 1 && set_ends_[0] == 0 && std::ranges::is_sorted(set_ends_) &&
               static_cast<std::size_t>(set_ends_.back()) == sets_.size());
    for (std::size_t i = 0; i < attributes_.size(); ++i) {
      attributes_[i].begin = static_cast<std::size_t>(ends[i]);
      attributes_[i].end = static_cast<std::size_t>(ends[i + 1]);
    }
    for (std::size_t value = 0; value < values; ++value) check_set(items_of(value));
  }

  void check_set(std::span<const std::uint32_t> set) const {
    const std::size_t items = item_nodes_.size();
    if (set.size() < words()) {
      consistent(std::ranges::all_of(set, [&](std::uint32_t item) { return item < items; }));
    } else {
      consistent(set.size() == words() && (items % kWordBits == 0 || set.back() >> items % kWordBits == 0));
    }
  }

  std::size_t words() const { return (item_nodes_.size() + kWordBits - 1) / kWordBits; }

  std::span<const std::uint32_t> items_of(std::size_t value) const {
    return sets_.subspan(static_cast<std::size_t>(set_ends_[value]),
                         static_cast<std::size_t>(set_ends_[value + 1] - set_ends_[value]));
  }

  std::string_view value(std::size_t index) const {
    return values_.substr(static_cast<std::size_t>(value_offsets_[index]),
                          static_cast<std::size_t>(value_offsets_[index + 1] - value_offsets_[index]));
  }

  // The value of that key, or kNone.
  std::size_t find(const Attribute& attribute, std::string_view key) const {
    std::size_t begin = attribute.begin;
    std::size_t end = attribute.end;
    while (begin < end) {
      const std::size_t middle = begin + (end - begin) / 2;
      if (value(middle) < key) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin < attribute.end && value(begin) == key ? begin : kNone;
  }

  // Calls `use` with the attribute's index and the items of each term's value.
  template <class Use>
  bool each_term(const Tensor* terms, const char* port, Status& status, Use use) const {
    for (std::int64_t row = 0; terms && row < terms->rows(); ++row) {
      const std::string_view term = terms->text(row);
      const std::size_t equals = term.find('=');
      const auto found = std::ranges::find(attributes_, term.substr(0, equals), &Attribute::name);
      const bool known = equals != std::string_view::npos && found != attributes_.end();
      const std::optional<Key> key = known ? Key::of(found->kind, term.substr(equals + 1)) : std::nullopt;
      if (!key) {
        status.fail(Code::invalid_request, "%s[%lld] must be NAME=VALUE of an attribute; there is %s", port,
                    static_cast<long long>(row), known_.c_str());
        return false;
      }
      const std::size_t value = find(*found, key->bytes());
      use(static_cast<std::size_t>(found - attributes_.begin()),
          value == kNone ? std::span<const std::uint32_t>() : items_of(value));
    }
    return true;
  }

  // Sets, or clears, the bits of a set.
  void apply(std::span<const std::uint32_t> set, std::uint64_t* words64, bool on) const {
    auto* const bits = reinterpret_cast<std::uint8_t*>(words64);
    if (set.size() < words() || set.empty()) {
      for (const std::uint32_t item : set) {
        const auto bit = static_cast<std::uint8_t>(1 << item % 8);
        bits[item / 8] = static_cast<std::uint8_t>(on ? bits[item / 8] | bit : bits[item / 8] & ~bit);
      }
      return;
    }
    for (std::size_t i = 0; i < set.size(); ++i) {
      std::uint32_t word;
      std::memcpy(&word, bits + 4 * i, sizeof(word));
      word = on ? word | set[i] : word & ~set[i];
      std::memcpy(bits + 4 * i, &word, sizeof(word));
    }
  }

  // Finds the permitted items. `scratch` has room for as many bits.
  bool select(const Lists& lists, Selection& selection, std::uint64_t* permitted, std::uint64_t* scratch,
              Status& status) const {
    if (lists.allow) {
      std::memset(permitted, 0, item_bytes());
      for (std::int64_t row = 0; row < lists.allow->rows(); ++row)
        if (const std::size_t item = find(lists.allow->text(row)); item != kNone) selection.permit(item);
    } else {
      std::ranges::copy(all_, permitted);
    }
    for (std::int64_t row = 0; lists.deny && row < lists.deny->rows(); ++row)
      if (const std::size_t item = find(lists.deny->text(row)); item != kNone) selection.forbid(item);
    std::size_t named = 0;  // a bit an attribute
    const auto note = [&](std::size_t attribute, auto) { named |= std::size_t{1} << attribute; };
    if (!each_term(lists.allow_where, "allow_where", status, note)) return false;
    for (std::size_t attribute = 0; attribute < attributes_.size(); ++attribute) {
      if ((named >> attribute & 1) == 0) continue;
      std::memset(scratch, 0, item_bytes());
      each_term(lists.allow_where, "allow_where", status, [&](std::size_t of, std::span<const std::uint32_t> set) {
        if (of == attribute) apply(set, scratch, true);
      });
      for (std::size_t i = 0; i < all_.size(); ++i) permitted[i] &= scratch[i];
    }
    return each_term(lists.deny_where, "deny_where", status,
                     [&](std::size_t, std::span<const std::uint32_t> set) { apply(set, permitted, false); });
  }

  // Marks the nodes for the permitted items, in the way that takes the fewest steps.
  void mark(std::uint8_t* marks, const std::uint64_t* permitted, Selection& selection) const {
    std::size_t left = 0;
    for (std::size_t i = 0; i < all_.size(); ++i) left += static_cast<std::size_t>(std::popcount(permitted[i]));
    const std::size_t few = label_.size() / kFewOf;
    if (item_nodes_.size() - left <= few) {
      std::ranges::copy(marks_, marks);
      each_bit(permitted, ~std::uint64_t{0}, [&](std::size_t item) { take_away(item, selection); });
      return;
    }
    std::memset(marks, 0, marks_.size());
    if (left <= few) {
      each_bit(permitted, 0, [&](std::size_t item) { admit(item, selection); });
      return;
    }
    // By value: bytes may be anything, so a pointer behind a reference is read again after every write.
    each_bit(permitted, 0, [marks, ends = item_nodes_.data()](std::size_t item) {
      const auto node = static_cast<std::uint32_t>(ends[item]);
      marks[node / 4] |= static_cast<std::uint8_t>(kEnds << node % 4 * 2);
    });
    open_all(marks);
  }

  // Opens every node that leads to a mark, from the last to the first; four nodes are a byte.
  void open_all(std::uint8_t* marks) const {
    const std::size_t above = first_.size() - 1;
    const std::int32_t* const first = first_.data();
    for (std::size_t begin = (above + 3) / 4 * 4; begin > 0;) {
      begin -= 4;
      // Only in the first bytes can a child be in its parent's byte: then a node is written before the next is read.
      const bool apart = static_cast<std::size_t>(first[begin]) >= begin + 4;
      unsigned open = 0;
      for (std::size_t node = std::min(begin + 4, above); node-- > begin;) {
        const bool leads =
            any_marked(marks, static_cast<std::size_t>(first[node]), static_cast<std::size_t>(first[node + 1]));
        open |= unsigned{leads} << (node % 4 * 2 + 1);  // kOpen, without a branch that nobody can predict
        if (!apart) marks[begin / 4] |= static_cast<std::uint8_t>(open);
      }
      marks[begin / 4] |= static_cast<std::uint8_t>(open);
    }
  }

  // Calls `use` with every item whose bit, changed by `flip`, is set.
  template <class Use>
  void each_bit(const std::uint64_t* bits, std::uint64_t flip, Use use) const {
    for (std::size_t i = 0; i < all_.size(); ++i)
      for (std::uint64_t word = (bits[i] ^ flip) & all_[i]; word != 0; word &= word - 1)
        use(64 * i + static_cast<std::size_t>(std::countr_zero(word)));
  }

  // Whether one of these nodes has a mark. Eight bytes behind the marks are readable.
  static bool any_marked(const std::uint8_t* marks, std::size_t begin, std::size_t end) {
    constexpr std::size_t kStep = 28;  // nodes whose bits one load has, whatever the first one's place in its byte
    std::uint64_t found = 0;
    for (;; begin += kStep) {
      std::uint64_t word;
      std::memcpy(&word, marks + begin / 4, sizeof(word));
      const std::size_t count = end - begin;
      found |= word >> begin % 4 * 2 & ((std::uint64_t{1} << 2 * std::min(kStep, count)) - 1);
      if (count <= kStep) return found != 0;
    }
  }

  // A node's label is a row of its level's alphabet. A level ends where the children of the level above end.
  void check_labels() const {
    std::size_t begin = 1;
    std::size_t end = static_cast<std::size_t>(first_[1]);
    for (std::size_t level = 0; level < levels_; ++level) {
      const std::int32_t rows = alphabet_ends_[level + 1] - alphabet_ends_[level];
      consistent(begin < end && end <= label_.size());
      consistent(std::ranges::all_of(label_.subspan(begin, end - begin),
                                     [&](std::int32_t row) { return row >= 0 && row < rows; }));
      begin = end;
      end = static_cast<std::size_t>(first_[std::min(end, first_.size() - 1)]);
    }
    consistent(begin == label_.size());
  }

  // The tables of levels, as deep as the graph is: levels that the catalog does not reach have one row, never looked
  // at.
  void extend(std::size_t depth, std::int64_t max_children) {
    if (levels_ > depth)
      file_.refuse("have items of " + std::to_string(levels_) + " tokens, over max_depth, " + std::to_string(depth));
    children_ends_.push_back(0);
    for (std::size_t level = 0; level < depth; ++level) {
      if (level >= levels_) {
        alphabets_.push_back(0);
        alphabet_ends_.push_back(alphabet_ends_.back() + 1);
      }
      const std::int32_t count = level < levels_ ? widest_[level] : 1;
      if (count > max_children)
        file_.refuse("have " + std::to_string(count) + " next tokens after one beginning, over max_children, " +
                     std::to_string(max_children));
      for (std::int32_t i = 0; i < count; ++i) children_.push_back(i);
      children_ends_.push_back(children_ends_.back() + count);
    }
  }

  std::string_view name(std::size_t item) const {
    return {reinterpret_cast<const char*>(items_.data()) + item_offsets_[item],
            static_cast<std::size_t>(item_offsets_[item + 1] - item_offsets_[item])};
  }

  // The item of that id, or kNone.
  std::size_t find(std::string_view id) const {
    const auto found = std::ranges::lower_bound(item_order_, id, {}, [&](std::uint32_t item) { return name(item); });
    return found == item_order_.end() || name(*found) != id ? kNone : *found;
  }

  // The node above another; first_ ascends, and of equal entries the last is the one with children.
  std::size_t parent(std::size_t node) const {
    const auto after = std::ranges::upper_bound(first_, static_cast<std::int32_t>(node));
    return static_cast<std::size_t>(after - first_.begin()) - 1;
  }

  // Opens what leads to a permitted item.
  void admit(std::size_t item, Selection& selection) const {
    auto node = static_cast<std::size_t>(item_nodes_[item]);
    selection.mark(node, kEnds);
    while (node != 0) {
      node = parent(node);
      if (selection.marks(node) & kOpen) break;
      selection.mark(node, kOpen);
    }
  }

  // Nodes that lead to nothing permitted without an item are closed, upwards.
  void take_away(std::size_t item, Selection& selection) const {
    const std::int32_t end = item_nodes_[item];
    const auto [begin, after] = std::equal_range(item_nodes_.begin(), item_nodes_.end(), end);
    for (auto at = begin; at != after; ++at)
      if (selection.permits(static_cast<std::size_t>(at - item_nodes_.begin()))) return;
    auto node = static_cast<std::size_t>(end);
    selection.unmark(node, kEnds);
    while (node != 0 && selection.marks(node) == 0) {
      node = parent(node);
      for (auto child = first_[node]; child < first_[node + 1]; ++child)
        if (selection.marks(static_cast<std::size_t>(child)) != 0) return;
      selection.unmark(node, kOpen);
    }
  }

  SectionFile file_;
  std::size_t max_nodes_, max_items_;
  std::size_t levels_ = 0;
  std::ptrdiff_t allow_ = -1, deny_ = -1, allow_where_ = -1, deny_where_ = -1;
  std::span<const std::int32_t> first_, label_, widest_, item_nodes_, item_offsets_;
  std::span<const std::uint8_t> marks_, items_;
  std::span<const std::uint32_t> item_order_;
  std::vector<std::int32_t> alphabets_, alphabet_ends_, children_, children_ends_;
  std::vector<std::uint64_t> all_;  // every item permitted
  std::vector<Attribute> attributes_;
  std::string known_;  // the attributes, for messages
  std::span<const std::int32_t> value_offsets_, set_ends_;
  std::string_view values_;
  std::span<const std::uint32_t> sets_;
};

}  // namespace

std::unique_ptr<CpuNode> make_catalog_node(const Config& config) { return std::make_unique<CatalogNode>(config); }

}  // namespace dagserve
