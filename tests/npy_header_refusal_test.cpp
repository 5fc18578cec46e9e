#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/npy_headers.hpp"
#include "tests/support/file_bytes.hpp"

// Headers of .npy files that are refused.

namespace {

using npy_bytes::header;
using npy_bytes::text;

struct bad_text {
    std::string text;
    std::string sentence;  ///< a part of it
};

void check_refused(const std::vector<bad_text>& cases, unsigned major_version = 1) {
    for (const bad_text& bad : cases) {
        CAPTURE(bad.text.substr(0, 200));
        const auto started = std::chrono::steady_clock::now();
        const std::string sentence = refusal(header(bad.text, major_version));
        CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(1));
        CHECK_MESSAGE(sentence.find(bad.sentence) != std::string::npos, sentence);
        CHECK(sentence.find('\n') == std::string::npos);
        CHECK(sentence.size() < 2000);
    }
}

}  // namespace

TEST_CASE("npy header: refuses what is not a .npy file") {
    const std::string rest = header(text("'<f4'", "(2, 3)")).substr(6);
    for (const std::string& begin :
         {std::string("\x92NUMPY"), std::string("\0NUMPY", 6), std::string("\x93numpy"),
          std::string("\x93MATLB"), std::string("PK\3\4ab")}) {
        CHECK(refusal(begin + rest).find("not a .npy file") != std::string::npos);
    }
    for (const char* const version : {"\0\0", "\0\1", "\1\1", "\2\2", "\4\0", "\xFF\xFF"}) {
        const std::string bytes = "\x93NUMPY" + std::string(version, 2) + rest.substr(2);
        CHECK(refusal(bytes).find("version is") != std::string::npos);
    }
}

TEST_CASE("npy header: refuses a file truncated after any byte") {
    for (const unsigned version : {1u, 2u, 3u}) {
        const std::string bytes = header(text("'<f4'", "(2, 3)") + "    \n", version) + std::string(24, 'x');
        CHECK_NOTHROW(parse(bytes, bytes.size()));
        for (std::size_t size = 0; size < bytes.size(); ++size) {
            CAPTURE(size);
            CHECK(refusal(bytes.substr(0, size), size) != "accepted");
        }
    }
}

TEST_CASE("npy header: refuses lengths that the file cannot hold, or that numpy would not read") {
    using namespace std::string_literals;
    CHECK(contains_all(refusal("\x93NUMPY\2\0\xF0\xFF\xFF\xFF"s, 12),
                       {"the header's length", "as 4294967280 bytes", "only 0 follow"}));
    CHECK(contains_all(refusal("\x93NUMPY\1\0\xFF\xFF{}"s, 12),
                       {"the header's length", "as 65535 bytes", "only 2 follow"}));
    CHECK(refusal("\x93NUMPY\2\0\xF0\xFF\xFF\xFF{}"s).find("numpy and pinflow read at most 10000") !=
          std::string::npos);
    CHECK(contains(refusal("\x93NUMPY\1\0\0\0"s, 10), "ends where '{'"));
    CHECK(refusal("\x93NUMPY\1\0\xFF\x00{}"s).find("but only 2 are there") != std::string::npos);

    const std::string short_text = text("'<f4'", "()");
    for (const unsigned version : {1u, 2u, 3u}) {
        CHECK_NOTHROW(parse(header(short_text + std::string(10'000 - short_text.size(), ' '), version)));
        CHECK(refusal(header(short_text + std::string(10'001 - short_text.size(), ' '), version)) !=
              "accepted");
    }
}

TEST_CASE("npy header: counts the limit of version 3.0 in characters") {
    const std::string begin = "{'descr': [('";
    const std::string end = "', '<f4')], 'fortran_order': False, 'shape': (), }";
    const std::size_t room = 10'000 - begin.size() - end.size();
    const auto read = parse(header(begin + repeated("\xF0\x9F\x98\x80", room) + end, 3));
    CHECK((read.dtype.fields()[0].name == repeated("\xF0\x9F\x98\x80", room)));
    CHECK(refusal(header(begin + repeated("\xF0\x9F\x98\x80", room + 1) + end, 3)).find("10001 characters") !=
          std::string::npos);
}

TEST_CASE("npy header: refuses malformed dictionaries") {
    const std::string good = text("'<f4'", "(2, 3)");
    check_refused({
        {"", "ends where '{'"},
        {"{", "ends where a string"},
        {"{}", "lacks the key 'descr'"},
        {"[]", "where '{' should be"},
        {"{'descr': '<f4', 'fortran_order': False, }", "lacks the key 'shape'"},
        {"{'descr': '<f4', 'shape': (), }", "lacks the key 'fortran_order'"},
        {"{'fortran_order': False, 'shape': (), }", "lacks the key 'descr'"},
        {good.substr(0, good.size() - 1) + "'extra': 1, }", "unknown key 'extra'"},
        {"{'Descr': '<f4', }", "unknown key 'Descr'"},
        {"{descr: '<f4', }", "where a string should be"},
        {"{'descr' '<f4', }", "where ':' should be"},
        {"{'descr': '<f4' 'fortran_order': False, }", "where ',' should be"},
        {"{'descr': '<f4',, 'fortran_order': False, }", "where a string should be"},
        {"{,}", "where a string should be"},
        {"{'descr: ", "the end of a string"},
        {"{'descr': '<f4\n', }", "the end of a string"},
        {"{'descr\\", "the end of a string"},
        {good + ",", "nothing but padding"},
        {good + "}", "nothing but padding"},
        {good + "\n x", "nothing but padding"},
        {good + std::string(1, '\0'), "nothing but padding"},
        {std::string("{\0'descr': '<f4'}", 17), "where a string should be"},
        {std::string("{'des\0cr': '<f4'}", 17), "the end of a string"},
        {"{'descr': '<\xE9\x34', 'fortran_order': False, 'shape': (), }", R"(type '<\xe94' is not one)"},
        {"{\xE9: 1}", "where a string should be"},
        {repeated("(", 5'000), "where '{' should be"},
        {repeated("{", 5'000), "where a string should be"},
        {repeated("(", 10'000), "where '{' should be"},
    });
}

TEST_CASE("npy header: refuses invalid UTF-8 in version 3.0") {
    for (const char* const bytes :
         {"\x80", "\xC3", "\xC0\xAF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80", "\xF4\x90\x80\x80",
          "\xF5\x80\x80\x80", "\xFF", "\xE2\x82", "\xC3\x28"}) {
        const std::string descr = "[('" + std::string(bytes) + "', '<f4')]";
        check_refused({{text(descr, "()"), "not valid UTF-8"}}, 3);
        CHECK(refusal(header(text(descr, "()"), 2)) == "accepted");
    }
}

TEST_CASE("npy header: refuses malformed shapes") {
    const auto shape = [](const std::string& literal) { return text("'<f4'", literal); };
    check_refused({
        {shape("(-1,)"), "where a length in the shape should be"},
        {shape("(" + repeated("-", 5'000) + "1,)"), "where a length in the shape should be"},
        {shape("(2, 18446744073709551614)"), "more than numpy allows"},
        {shape("(0, 9223372036854775808)"), "more than numpy allows"},
        {shape("(18446744073709551616,)"), "more than numpy allows"},
        {shape("(" + std::string(9'000, '9') + ",)"), "more than numpy allows"},
        {shape("(4294967296, 4294967296)"), "larger than any file"},
        {shape("(2305843009213693952,)"), "larger than any file"},
        {shape("(0, 9223372036854775807)"), "larger than any file"},
        {shape("(2305843009213693951,)"), "larger than any file"},
        {shape("(" + repeated("1, ", 65) + ")"), "more than 64 axes"},
        {shape("(3)"), "a number, not a tuple"},
        {shape("3"), "where '(' should be"},
        {shape("[2, 3]"), "where '(' should be"},
        {shape("None"), "where '(' should be"},
        {shape("(1.0,)"), "where ',' or ')'"},
        {shape("1.0"), "where '(' should be"},
        {shape("(1e3,)"), "where ',' or ')'"},
        {shape("(True, 2)"), "where a length in the shape should be"},
        {shape("('2',)"), "where a length in the shape should be"},
        {shape("(2 3)"), "where ',' or ')'"},
        {shape("(2,, 3)"), "where a length in the shape should be"},
        {shape("(,)"), "where a length in the shape should be"},
        {shape("(02,)"), "where a length in the shape should be"},
        {shape("(2l,)"), "where ',' or ')'"},
        {shape("(2LL,)"), "where ',' or ')'"},
        {shape("(2"), "where a length in the shape should be"},
        {"{'shape': (2", "ends where ',' or ')'"},
    });
    check_refused({{shape("(2L,)"), "where ',' or ')'"}}, 3);
}

TEST_CASE("npy header: refuses sizes that overflow with the data's offset") {
    // 2^63 - 16 bytes of data fit into numpy's integers, but not after a header
    const std::string bytes = header(text("'<f8'", "(1152921504606846974,)"));
    CHECK(refusal(bytes, any_size).find("larger than any file") != std::string::npos);
    CHECK(refusal(bytes, std::numeric_limits<std::uint64_t>::max()) == "accepted");
}

TEST_CASE("npy header: refuses other values of fortran_order than True and False") {
    for (const char* const value : {"1", "0", "None", "'True'", "true", "", "(True)"}) {
        check_refused({{text("'<f4'", "()", value), "True or False as fortran_order"}});
    }
    check_refused({{text("'<f4'", "()", "Truer"), "where ',' should be"}});
}

TEST_CASE("npy header: refuses types that numpy does not know, and types nested more than 32 deep") {
    for (const char* const descr : {"'<ixy'", "''", "'<f3'", "'<U1073741824'", "'|S99999999999999999999'"}) {
        check_refused({{text(descr, "()"), "is not one that numpy writes"}});
    }
    check_refused({
        {text("1", "()"), "where a string should be"},
        {text("None", "()"), "where a string should be"},
        {text("{}", "()"), "where a string should be"},
        {text(nested(1'000), "()"), "nested more than 32 deep"},
        {text(nested(33), "()"), "nested more than 32 deep"},
        {text("[('a', " + repeated("(", 4'000), "()"), "nested more than 32 deep"},
        {text(repeated("[", 4'000), "()"), "where '(' should be"},
        {text("'[(1)]'", "()"), "is not one that numpy writes"},
        {text("'bfloat16'", "()"), "is not one that numpy writes"},
        {text("'float8_e5m2'", "()"), "is not one that numpy writes"},
        {text("[('a', 'bfloat16')]", "()"), "is not one that numpy writes"},
        {text("[('a', '<f3')]", "()"), "is not one that numpy writes"},
    });
}

TEST_CASE("npy header: refuses malformed lists of fields") {
    const auto list = [](const std::string& literal) { return text(literal, "(3,)"); };
    check_refused({
        {list("[('a', '<f4'))"), "where ',' should be"},
        {list("[('a', -1)]"), "where a string should be"},
        {list("[('a', f())]"), "where a string should be"},
        {"{'descr': [('a', '<f4')", "ends where ',' should be"},
        {list("[,]"), "where '(' should be"},
        {list("[('a', '<f4') ('b', '<f4')]"), "where ',' should be"},
        {list("[('a', '<f4'),, ('b', '<f4')]"), "where '(' should be"},
        {list("['a']"), "where '(' should be"},
        {list("[()]"), "where a string should be"},
        {list("[('a',)]"), "where a string should be"},
        {list("[('a')]"), "where ',' should be"},
        {list("[(1, '<f4')]"), "where a string should be"},
        {list("[('a', '<f4', (2,), 1)]"), "where ')' should be"},
        {list("[('a', '<f4', (-1,))]"), "a length in the shape"},
        {list("[('a', '<f4', (2.0,))]"), "where ',' or ')'"},
        {list("[('a', '<f4', (True,))]"), "a length in the shape"},
        {list("[('a', '<f4', True)]"), "a length in the shape"},
        {list("[('a', '<f4', None)]"), "a length in the shape"},
        {list("[('a', '<f4', (2147483648, 0))]"), "more than numpy allows"},
        {list("[('a', '<f4', (536870912,))]"), "larger than numpy allows"},
        {list("[('a', '<f4', (268435456,)), ('b', '<f4', (268435456,))]"), "cannot have 2147483648 bytes"},
        {list("[('a', '|S2147483647'), ('b', '|i1')]"), "cannot have 2147483648 bytes"},
        {list("[('a', '|S2147483647'), ('', '|V1')]"), "cannot have 2147483648 bytes"},
        {list("[('', '|V2147483647', (4294967296, 4294967296)), ('a', '<f4')]"), "more than numpy allows"},
        {list("[('a', '<f4'), ('a', '<i4')]"), "two fields of a structured type are called 'a'"},
        {list("[(('t', 't'), '<f4')]"), "two fields of a structured type are called 't'"},
        {list("[(('t', 'a'), '<f4'), ('t', '<f4')]"), "two fields of a structured type are called 't'"},
        {list("[(('t', 'a'), '<f4'), (('t', 'b'), '<f4')]"),
         "two fields of a structured type are called 't'"},
        {list("[('a', '<f4'), (('a', 'b'), '<f4')]"), "two fields of a structured type are called 'a'"},
        {list("[(('t', 'n', 'x'), '<f4')]"), "where ')' should be"},
        {list("[(('t',), '<f4')]"), "where a string should be"},
        {list("[(b'a', '<f4')]"), "where a string should be"},
        {list("[('a\\x4', '<f4')]"), "stands for no character"},
        {list("[('a\\xg0', '<f4')]"), "stands for no character"},
        {list("[('a\\u12', '<f4')]"), "stands for no character"},
        {list("[('a\\U00110000', '<f4')]"), "stands for no character"},
        {list("[('a\\', '<f4')]"), "where ',' should be"},
        {list("[('a', ('<f4', (0,)), (2,)), ('b', '<f4')]"), "an array of arrays without bytes"},
        {list("[('a', ('<f4', (0,)), ()), ('b', '<f4')]"), "an array of arrays without bytes"},
        {list("[('a', ('<f4',))]"), "a length in the shape"},
        {list("[('a', ())]"), "where a string should be"},
    });
    check_refused({{list("[('a', '<f4', (2L,))]"), "where ',' or ')'"}}, 3);
}

TEST_CASE("npy header: calls pickled objects unsupported") {
    for (const char* const descr : {"'|O'", "'O'", "'|O8'", "[('a', '<f4'), ('b', '|O')]",
                                    "[('a', [('b', 'O', (2,))])]", "[('', 'O')]"}) {
        CHECK_THROWS_WITH_AS(parse(header(text(descr, "(3,)"))), doctest::Contains("pickle"),
                             pinflow::unsupported);
    }
}

TEST_CASE("npy header: reads types without bytes and without fields, and writes them as numpy does") {
    for (const char* const descr :
         {"'|V0'", "'|S0'", "'<U0'", "'>U0'", "[]", "[('', '|V4')]", "[('a', '|S0'), ('b', '<f4')]",
          "[('a', '|V0'), ('b', '>i2')]", "[('a', []), ('b', '<f4')]", "[('a', [], (2,))]",
          "[('a', [('', '|V4')])]", "[('a', '<f4', (0,))]", "[('a', '<U0')]"}) {
        CAPTURE(descr);
        const auto read = parse(header(text(descr, "(3,)")));
        CHECK(read.shape == pinflow::shape_vector{3});
        const std::string written = pinflow::format_npy_header(read.dtype, read.shape, false);
        CHECK(written.find("'descr': " + std::string(descr) + ",") != std::string::npos);
    }
    CHECK(parse(header(text("'|V0'", "(1099511627776, 7)"))).dtype.size_bytes() == 0);
}

TEST_CASE("npy header: refuses unusual headers that numpy accepts and no program writes") {
    const std::string good = text("'<f4'", "(2, 3)");
    struct {
        const char* name;
        std::string text;
    } const cases[] = {
        {"a key twice", good.substr(0, good.size() - 1) + "'shape': (2, 3), }"},
        {"a key twice with another value", good.substr(0, good.size() - 1) + "'shape': (1,), }"},
        {"descr twice", good.substr(0, good.size() - 1) + "'descr': '<f8', }"},
        {"fortran_order twice", good.substr(0, good.size() - 1) + "'fortran_order': True, }"},
        {"more elements of no bytes than can be counted", text("'|V0'", "(4294967296, 4294967296)")},
        {"an array of elements without bytes", text("[('a', '|S0', (2,)), ('b', '<f4')]", "(2, 3)")},
        {"a size that wraps to zero", text("'<U1073741824'", "(2, 3)")},
        {"a hexadecimal length", text("'<f4'", "(0x2, 3)")},
        {"an underscore in a length", text("'<f4'", "(1_0,)")},
        {"more zeros than one", text("'<f4'", "(00,)")},
        {"a sign of a length", text("'<f4'", "(+2, 3)")},
        {"minus zero", text("'<f4'", "(-0,)")},
        {"a length in parentheses", text("'<f4'", "((2), 3)")},
        {"a space before L", text("'<f4'", "(2 L, 3)")},
        {"adjacent strings", text("'<f' '4'", "(2, 3)")},
        {"triple quotes", text("'''<f4'''", "(2, 3)")},
        {"an escape in a type", text("'<f\\x34'", "(2, 3)")},
        {"an escape in a key", "{'d\\x65scr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"},
        {"a prefix of a string", text("r'<f4'", "(2, 3)")},
        {"Python 2's prefix of a string", text("u'<f4'", "(2, 3)")},
        {"parentheses around fortran_order", text("'<f4'", "(2, 3)", "(False)")},
        {"parentheses around it all", "(" + good + ")"},
        {"a comment at the end", good + "# comment"},
        {"a comment within", text("'<f4'", "(2, # comment\n3)")},
        {"a backslash before a line end", text("'<f4'", "(2, \\\n3)")},
        {"space before it all", " " + good},
        {"a line end before it all", "\n" + good},
        {"spaces after a line end", good + "\n  "},
        {"a carriage return", good + "\r\n"},
        {"a form feed", text("'<f4'", "(2,\f3)")},
        {"a structured type in short", text("'f4,i4'", "(2, 3)")},
        {"a subarray in short", text("'2f4'", "(2, 3)")},
        {"a type's letter without a size", text("'f'", "(2, 3)")},
        {"a divisor of a time unit", text("'<M8[7s/2]'", "(2, 3)")},
        {"a gap of any length", text("[('a', '<f4'), ('', 'V')]", "(2, 3)")},
        {"lengths beside 0 that are too large", text("[('a', '<f4', (0, 2147483647)), ('b', '<f4')]", "()")},
        {"a field without a name", text("[('', '<f4')]", "(2, 3)")},
        {"a field without a name, but with a title", text("[(('t', ''), '|V4')]", "(2, 3)")},
        {"an empty title", text("[(('', 'a'), '<f4')]", "(2, 3)")},
        {"no title", text("[((None, 'a'), '<f4')]", "(2, 3)")},
        {"a title that is a number", text("[((1, 'a'), '<f4')]", "(2, 3)")},
        {"a title in bytes", text("[((b't', 'a'), '<f4')]", "(2, 3)")},
        {"a list as a field", text("[['a', '<f4']]", "(2, 3)")},
        {"a list as a field's shape", text("[('a', '<f4', [2, 3])]", "(2, 3)")},
        {"the shape 1, which numpy will change its mind about", text("[('a', '<f4', 1)]", "(2, 3)")},
        {"a field's shape in parentheses", text("[('a', '<f4', (3))]", "(2, 3)")},
        {"a field's type in parentheses", text("[('a', ('<f4'))]", "(2, 3)")},
        {"more after a type and its shape", text("[('a', ('<f4', (2,), 3))]", "(2, 3)")},
        {"a field's types in short", text("[('a', 'f4,i4')]", "(2, 3)")},
        {"an array as an array's type", text("('<f4', (2,))", "(2, 3)")},
        {"an array without axes as an array's type", text("('<f4', ())", "(2, 3)")},
        {"an octal escape in a name", text("[('\\101', '<f4')]", "(2, 3)")},
        {"a bell in a name", text("[('\\a', '<f4')]", "(2, 3)")},
        {"a character's name in a name", text("[('\\N{BULLET}', '<f4')]", "(2, 3)")},
        {"a line end left out in a name", text("[('a\\\n', '<f4')]", "(2, 3)")},
        {"half of a surrogate pair in a name", text("[('\\ud83d', '<f4')]", "(2, 3)")},
        {"a tab in a name", text("[('a\tb', '<f4')]", "(2, 3)")},
        {"Python 2's prefix of a name", text("[(u'a', '<f4')]", "(2, 3)")},
        {"adjacent strings in a name", text("[('a' 'b', '<f4')]", "(2, 3)")},
        {"types nested 33 deep", text(nested(33), "()")},
    };
    for (const auto& [name, oddity] : cases) {
        CAPTURE(name);
        CHECK(refusal(header(oddity)) != "accepted");
    }
    CHECK(refusal(header(text("('<f4')", "(2, 3)"))) != "accepted");
    // Python 2's prefix of a title, in a version that Python 2 never wrote
    CHECK(refusal(header(text("[((u't', 'a'), '<f4')]", "(2, 3)"), 3)) != "accepted");
}
