// The server's process. Kiln, which starts it, sends lines of JSON, and reads some. At the end of its input the process ends.
package org.apache.spark.sql.hive.thriftserver { // Spark keeps its server for this package

  import org.apache.hive.service.server.HiveServer2
  import org.apache.spark.sql.SparkSession
  import org.apache.spark.sql.hive.HiveUtils
  import org.apache.spark.sql.hive.thriftserver.ui.HiveThriftServer2EventManager

  /** Spark's Thrift server, as HiveThriftServer2 is, with Kiln's service in the place of Spark's. */
  class KilnThriftServer(spark: SparkSession, login: kiln.Login) extends HiveServer2 with ReflectedCompositeService {
    def serve(): Unit = {
      HiveThriftServer2.systemExitOnError.set(true)
      HiveThriftServer2.eventManager = new HiveThriftServer2EventManager(spark.sparkContext)
      val cli = new SparkSQLCLIService(this, spark)
      addService(cli)
      addService(new kiln.Service(cli, login))
      initCompositeService(HiveUtils.newClientForExecution(spark.sparkContext.conf, spark.sessionState.newHadoopConf()).conf)
      startCompositeService()
    }
  }
}

package kiln {

  import java.util.HexFormat

  import scala.io.Source
  import scala.util.control.NonFatal

  import com.fasterxml.jackson.databind.ObjectMapper
  import org.apache.spark.sql.SparkSession
  import org.apache.spark.sql.hive.thriftserver.KilnThriftServer

  object Main {
    private val json = new ObjectMapper()
    private val out = System.out

    def main(arguments: Array[String]): Unit = {
      System.setOut(System.err)
      val spark = SparkSession.builder().getOrCreate()
      tell("started", "")
      val login = new Login(arguments(0), Array.emptyByteArray)
      for (line <- Source.fromInputStream(System.in, "UTF-8").getLines(); asked = json.readTree(line)) {
        def text(key: String) = Option(asked.get(key)).map(_.asText)
        text("password").foreach(digest => login.password = HexFormat.of().parseHex(digest))
        text("sql").foreach { sql =>
          try {
            spark.sql(sql)
            tell("done", "")
          } catch { case NonFatal(error) => tell("failed", error.toString.linesIterator.next()) }
        }
        text("serve").foreach { _ =>
          ReadOnly.close()
          new KilnThriftServer(spark, login).serve()
          tell("serving", "")
        }
      }
      System.exit(0)
    }

    private def tell(what: String, text: String): Unit = {
      out.println(json.createObjectNode().put(what, text))
      out.flush()
    }
  }
}
